"""A host without a reference to llama-sidecar: Python with llama-cpp-python's own class.

    python3 llama_cpp_python.py MODEL

LLAMA_CPP_LIB_PATH is the folder of libllama. Takes the commands `text N`, `more N` and `end` of
hosts/node/host.mjs on standard input.
"""

import itertools
import sys

from llama_cpp import Llama

PROMPT = b"The capital of France is"

model = Llama(sys.argv[1], n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
print("ready", flush=True)
last = []
for line in sys.stdin:
    command, *arguments = line.split()
    if command == "end":
        break
    new = command == "text"
    tokens = model.tokenize(PROMPT, add_bos=False) if new else last
    if new:
        model.reset()
    text = model.generate(tokens, temp=0.0, reset=False)
    written = list(itertools.islice(text, int(arguments[0])))
    last = written[-1:]
    print(*written, flush=True)
