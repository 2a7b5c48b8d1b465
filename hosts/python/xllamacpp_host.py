"""A host without a reference to llama-sidecar: xllamacpp, one prebuilt object with llama-server and llama.cpp
(PyPI: xllamacpp).

    xllamacpp_host.py MODEL

Takes commands on standard input:

    text N    N tokens after a prompt, and the log-probabilities of the likeliest tokens; JSON
    load P    loads another model
    free      frees the model
"""

import gc
import json
import sys

import xllamacpp


class Host:
    def __init__(self, path):
        self.load(path)

    def load(self, path):
        params = xllamacpp.CommonParams()
        params.model.path = path
        params.n_ctx = 256
        params.cpuparams.n_threads = 1
        params.warmup = False
        self.server = xllamacpp.Server(params)
        return "loaded"

    def text(self, count):
        request = {
            "prompt": "The capital of France is",
            "max_tokens": int(count),
            "temperature": 0,
            "logprobs": 5,
            "cache_prompt": False,
        }
        answer = self.server.handle_completions(request)
        answer = answer if isinstance(answer, dict) else json.loads(answer)
        choice = answer["choices"][0]
        return json.dumps([choice["text"], choice["logprobs"]])

    def free(self):
        self.server = None
        gc.collect()
        return "freed"


host = Host(sys.argv[1])
print("ready", flush=True)
for line in sys.stdin:
    command, *arguments = line.split()
    if command == "end":
        break
    print(getattr(host, command)(*arguments), flush=True)
