#!/usr/bin/env python3
"""Measures which tensors tolerate fewer bits, one by one, in a running server.

    tune.py --server http://127.0.0.1:8080 --socket /tmp/llama.sock \\
            --model model.gguf --from other.gguf --text sample.txt  REGEX...

For each regular expression, replaces the matching tensors by those of the --from file, reloads
them in the server, and measures the text: the mean negative log-likelihood (nats per token)
of its tokens, each predicted from those before it. Then restores the original tensors.
Requires a llama-server started with 'llama-sidecar run --hotswap --socket ...', and only
Python's standard library.
"""
import argparse
import json
import math
import subprocess
import sys
import time
import urllib.request


def ask(server, path, request):
    data = json.dumps(request).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(server + path, data, headers)) as answer:
        return json.load(answer)


def likelihood(server, tokens, first):
    """Returns the mean -log p of tokens[first:], and how many of them were among the candidates."""
    total, seen = 0.0, 0
    for at in range(first, len(tokens)):
        # Cached context was computed with the previous weights.
        answer = ask(server, "/completion", {
            "prompt": tokens[:at], "n_predict": 1, "n_probs": 200, "temperature": 0,
            "cache_prompt": False, "ignore_eos": True,
        })
        candidates = answer["completion_probabilities"][0]["top_logprobs"]
        found = [c["logprob"] for c in candidates if c["id"] == tokens[at]]
        # A token beyond the candidates is at most as likely as the last of them.
        total -= found[0] if found else min(c["logprob"] for c in candidates)
        seen += bool(found)
    return total / (len(tokens) - first), seen


def swap(arguments, *more):
    command = ["llama-sidecar", "swap", arguments.model, *more, "--reload", arguments.socket]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr or done.stdout)
    return done.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ["--server", "--socket", "--model", "--from", "--text"]:
        parser.add_argument(name, required=True, dest=name.strip("-").replace("from", "other"))
    parser.add_argument("--first", type=int, default=8, help="number of leading tokens that are not measured")
    parser.add_argument("regex", nargs="+")
    arguments = parser.parse_args()
    text = open(arguments.text, encoding="utf-8").read()
    tokens = ask(arguments.server, "/tokenize", {"content": text, "add_special": True})["tokens"]
    base, seen = likelihood(arguments.server, tokens, arguments.first)
    count = len(tokens) - arguments.first
    print(f"{'baseline':40} {base:8.4f} nats/token over {count} tokens ({seen} among the candidates)")
    for regex in arguments.regex:
        began = time.time()
        swap(arguments, "--tensor", regex, "--from", arguments.other)
        swapped = time.time() - began
        value, _ = likelihood(arguments.server, tokens, arguments.first)
        swap(arguments, "--restore")
        print(f"{regex:40} {value:8.4f} ({value - base:+.4f}), swapped in {swapped:.2f} s")
    again, _ = likelihood(arguments.server, tokens, arguments.first)
    if not math.isclose(again, base, rel_tol=0, abs_tol=1e-6):
        sys.exit(f"the baseline changed from {base} to {again}: check that no other program swaps the model")
    print("baseline measured again: identical")


if __name__ == "__main__":
    main()
