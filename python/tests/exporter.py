"""`llama-sidecar ctl metrics --listen`, read by Prometheus' own parser, and asked what it must refuse.

    python3 exporter.py LLAMA_SERVER MIXTURE
"""

import http.client
import os
import signal
import socket
import subprocess
import sys
import time

from llama_sidecar import command_path
from programs import LlamaServer
from prometheus_client.openmetrics.parser import text_string_to_metric_families

server, model = sys.argv[1:]
TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def get(port, path="/metrics", method="GET"):
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    client.request(method, path)
    answer = client.getresponse()
    return answer.status, answer.headers["Content-Type"], answer.read().decode()


def samples(port):
    status, kind, text = get(port)
    assert (status, kind) == (200, TYPE), (status, kind)
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(set(names)) == len(names), names
    return [sample for family in families for sample in family.samples]


def sent(port, data):
    """The first line of the answer to these bytes; empty if there is none."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        return client.makefile("rb").readline().decode(errors="replace").strip()


with LlamaServer(server, model, "--hotswap", "--expert-trace-stats") as running:
    running.ask()
    folder = os.path.dirname(running.socket)
    nowhere = os.path.join(folder, "nowhere")
    patterns = ["--socket", os.path.join(folder, "*ocket"), "--socket", nowhere]
    exporter = subprocess.Popen(
        [command_path(), "ctl", "metrics", "--listen", "127.0.0.1:0", *patterns],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = exporter.stderr.readline()
        port = int(line.rsplit(":", 1)[1].removesuffix("/metrics\n"))

        def values(name):
            found = [sample for sample in samples(port) if sample.name == f"llama_sidecar_{name}"]
            return {sample.labels["socket"]: sample.value for sample in found}

        assert values("up") == {running.socket: 1, nowhere: 0}
        before = values("evaluations_total")[running.socket]
        running.ask()
        assert values("evaluations_total")[running.socket] > before > 0
        assert values("switches_total") == {running.socket: 0}
        running.sidecar.swap(r"blk\.1\.ffn_up_exps\.weight", model, as_type="q4_0")
        assert values("switches_total") == {running.socket: 1}
        assert sum(sample.name.endswith("pause_seconds_bucket") for sample in samples(port)) > 3

        # A program that is stopped does not answer in time, and delays nothing for long.
        os.kill(running.process(), signal.SIGSTOP)
        began = time.monotonic()
        assert values("up") == {running.socket: 0, nowhere: 0}
        assert time.monotonic() - began < 8
        os.kill(running.process(), signal.SIGCONT)
        assert values("up")[running.socket] == 1

        assert get(port, "/")[0] == 404
        assert get(port, "/metrics/../../etc/passwd")[0] == 404
        assert get(port, method="POST")[0] == 405
        for data in [b"", b"\n", b"\0" * 100, b"\xff\xfe\r\n\r\n", b"GET\r\n\r\n", b"GET /metrics\r\n\r\n"]:
            assert sent(port, data) in ("", "HTTP/1.1 400 Bad Request"), data
        for data in [b"GET /" + b"a" * 100_000, b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 10_000]:
            try:
                sent(port, data)
            except OSError:
                pass
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
        for client in held:
            client.close()
        for _ in range(100):
            try:
                if values("up")[running.socket] == 1:
                    break
            except OSError:
                time.sleep(0.1)
        else:
            raise AssertionError("no answer after 40 connections")
        assert exporter.poll() is None
    finally:
        exporter.terminate()
        exporter.wait(10)
taken = subprocess.run(
    [command_path(), "ctl", "metrics", "--listen", "203.0.113.1:1", "--socket", "a"], capture_output=True
)
assert taken.returncode == 1 and b"cannot listen at 203.0.113.1:1" in taken.stderr, taken
print("metrics of running, stopped and missing programs; damaged requests are refused")
