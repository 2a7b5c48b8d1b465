"""What a new user does: a server with the drop-in, a swap, a trace, and what is refused.

    python3 first_use.py LLAMA_SERVER MIXTURE

Prints what was done and after how many seconds. Ends with an error where an answer is not the expected one.
"""

import sys
import tempfile
import time
from pathlib import Path

from programs import LlamaServer, free_socket
from llama_sidecar import Sidecar, SidecarError, Unreachable, preload_path

server, model = sys.argv[1:]
began = time.monotonic()
MATRIX = r"blk\.1\.ffn_up_exps\.weight"


def done(what):
    print(f"{time.monotonic() - began:.1f} s: {what}", flush=True)


def refused(what, call):
    try:
        call()
    except SidecarError as error:
        assert what in str(error), f"{error}: expected {what}"
    else:
        raise AssertionError(f"expected an error with {what}")


socket = free_socket()
try:
    Sidecar(socket).ping()
except Unreachable as error:
    assert f"--socket {socket}" in str(error)

with LlamaServer(server, model, "--hotswap", "--expert-trace-stats", "--expert-masks") as running:
    sidecar, ask = running.sidecar, running.ask
    original = ask()
    sidecar.ping()
    done("a server answers with the drop-in")

    (report,) = sidecar.swap(MATRIX, model, as_type="q4_0", progress=print)
    assert report["swapped"] == 1, report
    swapped = ask()
    assert swapped != original
    (overlay,) = sidecar.overlays()
    assert overlay["name"] == "blk.1.ffn_up_exps.weight", overlay
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile"
        sidecar.save(profile)
        assert "blk" in profile.read_text(), profile.read_text()
    done("first swap")

    (report,) = sidecar.undo(MATRIX)
    assert report["returned"] == 1, report
    refused("nothing to save", lambda: sidecar.save("/tmp/none"))
    assert ask() == original
    sidecar.reset_trace()
    assert ask() == original
    (trace,) = sidecar.trace()
    counts = trace.counts()
    assert len(counts) == len(trace.layers)
    for layer in trace.layers:
        assert sum(map(int, layer.counts)) == layer.tokens * trace.experts_used > 0, layer
    done(f"first trace: {trace.tokens} tokens in {len(counts)} layers, {type(counts).__name__}")

    layer = trace.layers[0]
    expert = max(range(len(layer.counts)), key=lambda number: layer.counts[number])
    sidecar.mask({layer.number: [expert]})
    sidecar.reset_trace()
    masked = ask()
    (trace,) = sidecar.trace()
    assert trace.layers[0].counts[expert] == 0 and masked != original
    assert sidecar.undo() == []
    assert ask() == original
    refused("use 0 to", lambda: sidecar.mask({layer.number: [9999]}))
    refused("--accept-changed-results", lambda: sidecar.prefer(0.1))
    done("first mask")

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
    (report,) = sidecar.freeze()
    sidecar.unfreeze()
    (report,) = sidecar.reload()
    assert report["swapped"] == 0, report
    assert sidecar.status()["models"][0]["files"] == [model]
    done("all requests")
assert preload_path().exists()
