"""Writes tokens with ik_llama.cpp's Python bindings (PyPI: ik-llama-cpp-python).

    ik_llama.py MODEL
"""

import sys

from ik_llama_cpp import IkLlama

model = IkLlama(sys.argv[1], n_ctx=256, n_threads=2)
tokens = model.generate(model.tokenize("The capital of France is"), max_tokens=12)
print(*tokens)
