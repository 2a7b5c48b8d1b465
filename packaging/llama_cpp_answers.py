"""Answers prompts with llama-cpp-python, for `llama-sidecar compare`:

    llama-sidecar compare -- python3 llama_cpp_answers.py MODEL [TOKENS [THREADS]]

Prompts are lines of standard input, or one of its own. libllama prints the speeds at the end.
"""

import sys

from llama_cpp import Llama

PROMPT = "Explain in a few sentences why the sea is salt, and why lakes mostly are not."

path, *numbers = sys.argv[1:]
tokens, threads = (list(map(int, numbers)) + [48, None])[:2] if numbers else (48, None)
prompts = [line.rstrip("\n") for line in sys.stdin if line.strip()] or [PROMPT]
model = Llama(path, n_ctx=4096, n_threads=threads, n_threads_batch=threads, seed=1, verbose=True)
for prompt in prompts:
    model.reset()
    answer = model.create_completion(prompt, max_tokens=tokens, temperature=0.0)
    print(answer["choices"][0]["text"])
