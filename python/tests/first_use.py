"""What a new user does: a server with the drop-in, a swap, a trace, and what is refused.

    python3 first_use.py LLAMA_SERVER MIXTURE

Prints what was done and after how many seconds. Ends with an error where an answer is not the expected one.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request

from llama_sidecar import Sidecar, SidecarError, Unreachable, command_path, preload_path

server, model = sys.argv[1:]
began = time.monotonic()
folder = tempfile.mkdtemp()
socket = os.path.join(folder, "socket")
MATRIX = r"blk\.1\.ffn_up_exps\.weight"


def done(what):
    print(f"{time.monotonic() - began:.1f} s: {what}", flush=True)


def wait(until):
    for _ in range(1200):
        try:
            return until()
        except (OSError, SidecarError):
            time.sleep(0.1)
    return until()


def ask(port):
    body = {"prompt": "The capital of France is", "n_predict": 6, "temperature": 0, "n_probs": 3}
    body["cache_prompt"] = False
    url = f"http://127.0.0.1:{port}/completion"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["completion_probabilities"]


def refused(what, call):
    try:
        call()
    except SidecarError as error:
        assert what in str(error), f"{error}: expected {what}"
    else:
        raise AssertionError(f"expected an error with {what}")


def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


sidecar = Sidecar(socket)
try:
    sidecar.ping()
except Unreachable as error:
    assert f"--socket {socket}" in str(error)

port = free_port()
options = ["--hotswap", "--expert-trace-stats", "--socket", socket]
arguments = ["-m", model, "--host", "127.0.0.1", "--port", str(port), "-t", "1", "--parallel", "1"]
log = open(os.path.join(folder, "log"), "w")
program = subprocess.Popen(
    [command_path(), "run", *options, "--", server, *arguments, "-c", "256", "--no-webui"],
    stdout=log,
    stderr=log,
)
try:
    wait(lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close())
    original = ask(port)
    wait(sidecar.ping)
    done("a server answers with the drop-in")

    (report,) = sidecar.swap(MATRIX, model, as_type="q4_0", progress=print)
    assert report["swapped"] == 1, report
    swapped = ask(port)
    assert swapped != original
    (overlay,) = sidecar.overlays()
    assert overlay["name"] == "blk.1.ffn_up_exps.weight", overlay
    done("first swap")

    (report,) = sidecar.restore(MATRIX)
    assert report["returned"] == 1, report
    assert ask(port) == original
    sidecar.reset_trace()
    assert ask(port) == original
    (trace,) = sidecar.trace()
    counts = trace.counts()
    assert len(counts) == len(trace.layers)
    for layer in trace.layers:
        assert sum(map(int, layer.counts)) == layer.tokens * trace.experts_used > 0, layer
    done(f"first trace: {trace.tokens} tokens in {len(counts)} layers, {type(counts).__name__}")

    # The file of a pattern must exist, and has to have tensors of these names and shapes.
    refused("no tensor", lambda: sidecar.swap("blk.99.none", model))
    refused("type", lambda: sidecar.swap(MATRIX, model, as_type="q9_Z"))
    try:
        sidecar.swap(MATRIX, "/nowhere.gguf")
    except FileNotFoundError:
        pass
    refused("", lambda: sidecar.round())
    (report,) = sidecar.swaps({MATRIX: model})
    assert sidecar.metrics()["llama_sidecar_evaluations_total"] > 0
    (report,) = sidecar.revert()
    sidecar.unfreeze()
    (report,) = sidecar.reload()
    assert report["swapped"] == 0, report
    assert sidecar.status()["models"][0]["files"] == [model]
    done("all requests")
finally:
    program.terminate()
    status = program.wait(60)
assert preload_path().exists()
assert status == 0, f"the server ended with {status}: {open(log.name).read()}"
