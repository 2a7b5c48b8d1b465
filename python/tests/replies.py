"""Programs that are damaged, stopped or slow: a deadline holds for the whole answer, and each odd answer is one type of error.

    python3 replies.py
"""

import json
import os
import socket
import tempfile
import threading
import time
from pathlib import Path

from llama_sidecar import Sidecar, SidecarError, Unreachable

folder = Path(tempfile.mkdtemp())


def program(name, answer):
    """A socket whose clients get what `answer` sends."""
    path = folder / name
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve():
        while True:
            client, _ = listener.accept()
            threading.Thread(target=one, args=[client], daemon=True).start()

    def one(client):
        with client:
            try:
                client.recv(1 << 16)
                answer(client)
            except OSError:
                pass

    threading.Thread(target=serve, daemon=True).start()
    return path


def drips(client):
    """A byte now and then, as long as there is a reader."""
    while True:
        client.sendall(b" ")
        time.sleep(0.02)


def calls(sidecar):
    return [
        sidecar.ping,
        sidecar.status,
        sidecar.reload,
        sidecar.freeze,
        sidecar.overlays,
        sidecar.trace,
        sidecar.metrics,
        lambda: sidecar.mask({0: [1]}),
    ]


busy = b'{"ok": false, "busy": true, "error": "too many"}\n'
for number, answer in enumerate([drips, lambda client: time.sleep(60)]):
    for call in calls(Sidecar(program(f"slow{number}", answer), timeout=0.2)):
        # Without a deadline, the test does not end.
        try:
            call()
        except Unreachable as error:
            assert "gave no answer in 0.2 s" in str(error), error
        else:
            raise AssertionError(f"{call} has an answer")

# Through the command.
try:
    Sidecar(program("late", lambda client: time.sleep(60)), timeout=0.2).undo()
except SidecarError as error:
    assert "does not answer in time" in str(error), error
else:
    raise AssertionError("a stopped program has an answer")

# Without a timeout, too.
try:
    Sidecar(program("stopped", lambda client: time.sleep(60))).status()
except Unreachable as error:
    assert "gave no answer in 5.0 s" in str(error), error
else:
    raise AssertionError("a stopped program has an answer")

texts = ["", "[]", "3", "null", "{", "\xff", '"a"', "[" * 100_000, '{"ok": 1}', '{"ok": false, "reports": 3}']
good = {"ok": True}
odd = [None, 3, "a", [3], [None], ["a"], [{}], [[]], {}, [{"changed": 3}], [{"layers": 1}], [{"files": [3]}]]
for key in ("reports", "models", "traces", "text"):
    texts += [json.dumps(good | {key: value}) for value in odd]
texts.append(json.dumps({"ok": False, "reports": [{"files": [{"cause": "x"}]}]}))
for number, text in enumerate(texts):
    path = program(f"odd{number}", lambda client, text=text: client.sendall(text.encode("latin1") + b"\n"))
    for call in calls(Sidecar(path, timeout=60)):
        try:
            call()
        except SidecarError:
            pass
closed = program("closed", lambda client: None)
for call in calls(Sidecar(closed, timeout=60)):
    try:
        call()
    except Unreachable as error:
        assert "ended before it answered" in str(error), error
    else:
        raise AssertionError(f"{call} has an answer")
try:
    Sidecar(program("busy", lambda client: client.sendall(busy)), timeout=0.5).ping()
except SidecarError as error:
    assert str(error) == "too many", error


answers = [busy]


def busy_then_late(client):
    """Answers once."""
    client.sendall(answers.pop()) if answers else time.sleep(60)


try:
    Sidecar(program("busy_then_late", busy_then_late), timeout=0.5).ping()
except SidecarError as error:
    assert str(error) == "too many", error
else:
    raise AssertionError("it was busy")


def refuses(client):
    """Answers before it has read all, as the program does with a line that is too long."""
    client.sendall(b'{"ok": false, "error": "too long"}\n')


try:
    Sidecar(program("refuses", refuses), timeout=60).mark("x" * 10**7)
except SidecarError as error:
    assert str(error) == "too long", error
else:
    raise AssertionError("it was refused")

# The kernel keeps some clients for a program that accepts none.
full = socket.socket(socket.AF_UNIX)
full.bind(str(folder / "full"))
full.listen(0)
waiting = []
while True:
    client = socket.socket(socket.AF_UNIX)
    client.setblocking(False)
    try:
        client.connect(str(folder / "full"))
    except BlockingIOError:
        break
    waiting.append(client)
began = time.monotonic()
try:
    Sidecar(folder / "full", timeout=0.3).ping()
except Unreachable as error:
    assert "gave no answer in 0.3 s" in str(error), error
assert time.monotonic() - began >= 0.3

# What follows an answer is not waited for.
more = Sidecar(program("more", lambda client: (client.sendall(b'{"ok": true}\n{'), time.sleep(60))), timeout=30)
began = time.monotonic()
more.ping()
assert time.monotonic() - began < 20


class Number:
    """An integer as numpy has them, which JSON does not know."""

    def __init__(self, number):
        self.number = number

    def __index__(self):
        return self.number


asked = []
path = program("number", lambda client: client.sendall(b'{"ok": true}\n'))
sidecar = Sidecar(path, timeout=60)
sidecar._exchange = lambda sent, timeout, until: asked.append(json.loads(sent)) or {"ok": True}
sidecar.mask({Number(3): [Number(5), 7]})
assert asked == [{"cmd": "mask", "masks": [{"layer": 3, "experts": [5, 7]}], "clear": False}], asked
for timeout in (0, -1, float("inf"), float("nan")):
    try:
        Sidecar(path, timeout=timeout)
    except ValueError as error:
        assert "expected a timeout" in str(error), error
    else:
        raise AssertionError(f"{timeout} is a timeout")
try:
    Sidecar(folder / ("n" * 200)).ping()
except Unreachable as error:
    assert "at most 107 bytes" in str(error), error
# Without a path: the only program that listens, beside a socket that a killed one has left.
os.environ["XDG_RUNTIME_DIR"] = str(folder)
(folder / "llama-sidecar").mkdir()
left = socket.socket(socket.AF_UNIX)
left.bind(str(folder / "llama-sidecar/left-1.sock"))
left.close()
try:
    Sidecar()
    raise AssertionError("no program runs")
except Unreachable as error:
    assert "no program is found" in str(error), error
only = program("llama-sidecar/only-2.sock", lambda client: client.sendall(b'{"ok":true}\n'))
assert Sidecar().socket == only
program("llama-sidecar/other-3.sock", drips)
try:
    Sidecar()
    raise AssertionError("several programs run")
except Unreachable as error:
    assert str(only) in str(error), error

print(f"{len(texts)} odd answers are errors of one type, and slow programs end at the deadline")
