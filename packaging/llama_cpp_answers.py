"""Answers prompts with llama-cpp-python, for `llama-sidecar compare`:

    llama-sidecar compare -- python3 llama_cpp_answers.py MODEL [TOKENS [THREADS]]

Prompts are lines of standard input, or one of its own. Prints the answers, and on standard error the times
in the words of libllama. The time of a prompt ends with the first token of its answer.
"""

import sys
import time

from llama_cpp import Llama

PROMPT = "Explain in a few sentences why the sea is salt, and why lakes mostly are not."

path, *numbers = sys.argv[1:]
tokens, threads = ([int(number) for number in numbers] + [48, None][len(numbers) :])[:2]
prompts = [line.rstrip("\n") for line in sys.stdin if line.strip()] or [PROMPT]
model = Llama(path, n_ctx=4096, n_threads=threads, n_threads_batch=threads, seed=1, verbose=False)
for prompt in prompts:
    model.reset()
    begin = time.perf_counter()
    pieces, times = [], []
    for chunk in model.create_completion(prompt, max_tokens=tokens, temperature=0.0, stream=True):
        pieces.append(chunk["choices"][0]["text"])
        times.append(1e3 * (time.perf_counter() - begin))
    print("".join(pieces))
    read, written = len(model.tokenize(prompt.encode())), len(times) - 1
    print(f"prompt eval time = {times[0]:.2f} ms / {read} tokens", file=sys.stderr)
    print(f"eval time = {times[-1] - times[0]:.2f} ms / {written} runs", file=sys.stderr)
