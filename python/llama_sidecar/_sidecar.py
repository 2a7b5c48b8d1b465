"""Requests to a program that runs with the drop-in. docs/protocol.md has their answers."""

from __future__ import annotations

import contextlib
import errno
import json
import operator
import os
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Sequence

from ._files import command_path

Reply = dict[str, Any]

_LONGEST_REPLY = 64 << 20
# In seconds; what the system can wait for.
_LONGEST_TIMEOUT = 1 << 30
# Of answers that wait neither for an evaluation nor for a disk, of rounds, and of others; as in the command.
_TIMEOUTS = {"ping": 5.0, "status": 5.0, "metrics": 5.0, "round": None, "round-end": None}
_TIMEOUT = 3600.0
_PART = 1 << 16
# Of an address of AF_UNIX, without the NUL at its end.
_LONGEST_PATH = 107
# How often a request is sent again to a socket with too many clients, and after how many seconds.
_ATTEMPTS = 20
_PAUSE = 0.2


class SidecarError(Exception):
    """A request that was refused, or failed. The text has what failed, and the next step.

    `reply` is the answer of the program; empty if there was none.
    """

    def __init__(self, text: str, reply: Mapping[str, Any] | None = None) -> None:
        super().__init__(text)
        self.reply: Reply = dict(reply or {})


class Unreachable(SidecarError):
    """No program answers at the socket."""


@dataclass(frozen=True)
class Layer:
    """The routed experts of a layer."""

    number: int
    tokens: int
    counts: Sequence[int]
    """How often each expert was used. An array where numpy is installed, else a list."""


@dataclass(frozen=True)
class Trace:
    """The expert counts of a model."""

    tokens: int
    experts_used: int
    layers: Sequence[Layer]
    raw: Reply
    """All fields, as docs/trace-formats.md lists them."""

    def counts(self) -> Any:
        """Returns the counts of all layers: rows are layers. An array where numpy is installed, else a list."""
        return _array([list(map(int, layer.counts)) for layer in self.layers])


def _array(numbers: list[Any]) -> Any:
    try:
        import numpy
    except ImportError:
        return numbers
    if len({len(row) for row in numbers if isinstance(row, list)}) > 1:
        return numbers
    return numpy.array(numbers, dtype=numpy.uint64)


def _only() -> Path:
    """Returns the socket of the only program that 'llama-sidecar run' has started without a path for one."""
    session = os.environ.get("XDG_RUNTIME_DIR")
    found = [path for path in Path(session or "/nowhere", "llama-sidecar").glob("*.sock") if _listens(path)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(map(str, sorted(found))) or "no program is found"
    raise Unreachable(f"pass the path of a socket: {names}")


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        return client.connect_ex(os.fspath(path)) in (0, errno.EAGAIN)


class Sidecar:
    """A program that runs with the drop-in, by the path of its control socket.

    Without a path, that of the only program that 'llama-sidecar run' has started without one.

    Each method is one connection, so that an object can be used by several threads. Methods raise
    :class:`SidecarError` with the message of the program.

    >>> Sidecar("/nowhere").ping()
    Traceback (most recent call last):
      ...
    llama_sidecar._sidecar.Unreachable: no program answers at /nowhere: start it with llama-sidecar run --socket /nowhere
    """

    def __init__(self, socket: str | os.PathLike[str] | None = None, timeout: float | None = None) -> None:
        """`timeout` in seconds is until when an answer has to be complete.

        Without, that is 5 for `ping`, `status` and `metrics`, and 3600 for others; a round takes as long as it takes.
        """
        if timeout is not None and not 0 < timeout <= _LONGEST_TIMEOUT:
            raise ValueError(f"expected a timeout above 0 and up to {_LONGEST_TIMEOUT} s, found {timeout}")
        self.socket = _only() if socket is None else Path(socket)
        self.timeout = timeout

    def request(self, command: str, **fields: Any) -> Reply:
        """Sends a request and returns its answer."""
        sent = json.dumps({"cmd": command, **fields}).encode() + b"\n"
        timeout = _TIMEOUTS.get(command, _TIMEOUT) if self.timeout is None else self.timeout
        until = None if timeout is None else time.monotonic() + timeout
        reply = self._exchange(sent, timeout, until)
        for _ in range(_ATTEMPTS):
            if not reply.get("busy") or (until is not None and time.monotonic() + _PAUSE >= until):
                break
            time.sleep(_PAUSE)
            try:
                reply = self._exchange(sent, timeout, until)
            except Unreachable:
                # A late program has given a reason before.
                if until is None or time.monotonic() < until:
                    raise
                break
        return _checked(reply)

    def _exchange(self, sent: bytes, timeout: float | None, until: float | None) -> Reply:
        line = bytearray()
        try:
            with socket.socket(socket.AF_UNIX) as client:
                self._connect(client, until)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    # The answer says why not all of it is read.
                    client.sendall(sent)
                part = b""
                while b"\n" not in part and len(line) < _LONGEST_REPLY:
                    client.settimeout(_left(until))
                    part = client.recv(_PART)
                    if not part:
                        break
                    line += part
        except TimeoutError as error:
            text = f"{self.socket} gave no answer in {timeout} s: wait longer (timeout=)"
            raise Unreachable(text) from error
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Unreachable(f"the program at {self.socket} ended before it answered") from error
        except PermissionError as error:
            text = f"{self.socket} belongs to another user, or its folder does: run this as the user of the program"
            raise Unreachable(text) from error
        except OSError as error:
            if len(os.fsencode(self.socket)) > _LONGEST_PATH:
                raise Unreachable(f"the path of a socket has at most {_LONGEST_PATH} bytes: {self.socket}") from error
            text = f"no program answers at {self.socket}: start it with llama-sidecar run --socket {self.socket}"
            raise Unreachable(text) from error
        answer, newline, _ = line.partition(b"\n")
        if not newline:
            raise Unreachable(f"the program at {self.socket} ended before it answered")
        reply: Reply = _read(_object, answer)
        return reply

    def _connect(self, client: socket.socket, until: float | None) -> None:
        """Connects; waits while as many clients wait as the program's list holds."""
        while True:
            client.settimeout(_left(until))
            try:
                return client.connect(os.fspath(self.socket))
            except BlockingIOError:
                time.sleep(_PAUSE)

    def ping(self) -> None:
        """Checks that a program answers."""
        self.request("ping")

    def status(self) -> Reply:
        """Returns models, swapped tensors, what is delayed and why."""
        return self.request("status")

    def reload(self) -> list[Reply]:
        """Uses the changed files of all models; returns a report for each, after the switch."""
        return _reports(self.request("reload"))

    def swap(
        self,
        tensor: str,
        source: str | os.PathLike[str],
        as_type: str | None = None,
        *,
        imatrix: str | os.PathLike[str] | None = None,
        revert: str | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> list[Reply]:
        """Gives tensors type and bytes of another model; returns a report for each model, after the switch.

        `tensor` is a regular expression for whole names, `source` a GGUF file. With `as_type`, such as "q4_K", the
        tensors are quantised first, with an importance matrix if there is one; `progress` gets the lines that the
        command prints meanwhile. `revert` are the names of overlays that end in the same switch.
        """
        if as_type is None:
            return self.swaps({tensor: source}, revert)
        path = str(Path(source).resolve(strict=True))
        if revert is not None:
            raise ValueError("revert and as_type are two switches: call undo() first")
        arguments = ["--live", "-s", str(self.socket), "--tensor", tensor, "--from", path]
        arguments += ["--as", as_type, "--json"]
        if self.timeout is not None:
            arguments += ["--timeout", str(self.timeout)]
        if imatrix is not None:
            arguments += ["--imatrix", os.fspath(imatrix)]
        return _reports(_checked(_command(["swap", *arguments], progress)))

    def swaps(self, sources: Mapping[str, str | os.PathLike[str]], revert: str | None = None) -> list[Reply]:
        """Gives several groups of tensors bytes of other models in one switch: a source for each regular expression."""
        overlays = [
            {"tensor": tensor, "from": str(Path(source).resolve(strict=True))}
            for tensor, source in sources.items()
        ]
        fields = {"revert": revert} if revert is not None else {}
        return _reports(self.request("swap", overlays=overlays, **fields))

    def undo(self, tensor: str | None = None) -> list[Reply]:
        """Returns what was changed, as the command does: tensors, masks, margin and frozen reloads.

        With `tensor`, only overlays of tensors whose names match. Returns a report for each model and each switch.
        """
        arguments = ["undo", "-s", str(self.socket), "--json"]
        arguments += [] if tensor is None else ["--tensor", tensor]
        arguments += [] if self.timeout is None else ["--timeout", str(self.timeout)]
        undone = _read(_undone, _command(arguments, None))
        return [report for reply in undone if "reports" in _checked(reply) for report in _reports(reply)]

    def save(self, profile: str | os.PathLike[str]) -> None:
        """Writes the overlays and masks to a file for ``llama-sidecar run --profile``."""
        arguments = ["status", "-s", str(self.socket), "--save", os.fspath(profile)]
        saved = subprocess.run([command_path(), *arguments], capture_output=True, text=True, check=False)
        if saved.returncode != 0:
            raise SidecarError(saved.stderr.strip())

    def freeze(self) -> list[Reply]:
        """Returns all tensors to their originals, and freezes reloads; returns a report for each model."""
        return _reports(self.request("revert"))

    def unfreeze(self) -> None:
        """Permits reloads after :meth:`freeze`."""
        self.request("unfreeze")

    def overlays(self) -> list[Reply]:
        """Returns the tensors of all models that have other bytes: name, types, source and state."""
        changed: list[Reply] = _read(_overlays, self.status())
        return changed

    def round(self, start: bool = False) -> Reply:
        """Waits for the end of a round of llama-perplexity, of a new one with `start`; returns number and exit status."""
        return self.request("round", **({"start": True} if start else {}))

    def round_end(self) -> None:
        """Lets a program with rounds end."""
        self.request("round-end")

    def trace(self) -> list[Trace]:
        """Returns the expert counts of each model."""
        traces: list[Trace] = _read(_traces, self.request("trace"))
        return traces

    def reset_trace(self) -> None:
        """Starts counting experts again."""
        self.request("trace-reset")

    def mask(self, experts: Mapping[int, Iterable[int]], clear: bool = False) -> None:
        """Masks these experts, by layer, in place of those before; with `clear`, other layers have no mask."""
        # Numbers of numpy, too.
        masks = [
            {"layer": operator.index(layer), "experts": [operator.index(expert) for expert in of_layer]}
            for layer, of_layer in experts.items()
        ]
        self.request("mask", masks=masks, clear=clear)

    def prefer(self, margin: float) -> None:
        """Sets the margin within which experts in memory are preferred, 0 to 1."""
        self.request("prefer", margin=float(margin))

    def mark(self, text: str) -> None:
        """Notes a text at the current position of the routes."""
        self.request("mark", text=text)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics by name and labels, as in docs/protocol.md.

        >>> _metrics("# HELP a b\\na 1\\na_total{model=\\"1\\"} 2.5\\n")
        {'a': 1.0, 'a_total{model="1"}': 2.5}
        """
        metrics: dict[str, float] = _read(lambda reply: _metrics(reply["text"]), self.request("metrics"))
        return metrics


def _left(until: float | None) -> float | None:
    """Returns the seconds until a moment; fails after it."""
    if until is None:
        return None
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _read(read: Callable[[Any], Any], answer: Any) -> Any:
    """Returns what a function finds in an answer; one of another form is an error of the program."""
    try:
        return read(answer)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        text = f"the answer has not the expected form ({error!r}): use the module of the version that runs"
        raise SidecarError(text, answer if isinstance(answer, dict) else None) from error


def _object(text: bytes | str) -> Reply:
    reply = json.loads(text)
    if not isinstance(reply, dict):
        raise TypeError(f"{type(reply).__name__} in place of an object")
    return reply


def _checked(reply: Reply) -> Reply:
    if reply.get("ok") is True:
        return reply
    raise SidecarError(_read(_failure, reply), reply)


def _failure(reply: Reply) -> str:
    """Returns why a request failed: the program's own words."""
    if reply.get("error"):
        return str(reply["error"])
    texts = list(_failures(reply.get("reports", [])))
    return "; ".join(texts) or "the program refused the request, and gave no reason"


def _failures(reports: Iterable[Reply]) -> Iterable[str]:
    for report in reports:
        if report.get("error"):
            yield str(report["error"])
        if report.get("failure"):
            yield str(report["failure"])
        for file in report.get("files", []):
            if file.get("cause"):
                yield f"{file['path']}: {file.get('reason') or file['cause']}"


def _reports(reply: Reply) -> list[Reply]:
    reports: list[Reply] = _read(_list_of_reports, reply)
    return reports


def _undone(answer: Reply) -> list[Reply]:
    # A refusal has no list.
    return [step["reply"] for step in answer["undone"]] if "undone" in answer else [answer]


def _list_of_reports(reply: Reply) -> list[Reply]:
    reports = reply["reports"]
    if not all(isinstance(report, dict) for report in reports):
        raise TypeError("a report is not an object")
    return list(reports)


def _overlays(status: Reply) -> list[Reply]:
    return [tensor for model in status["models"] for tensor in model["changed"]]


def _traces(reply: Reply) -> list[Trace]:
    return [_trace(trace) for trace in reply["traces"]]


def _trace(raw: Reply) -> Trace:
    layers = [
        Layer(layer["layer"], layer["tokens"], _array(layer["counts"])) for layer in raw["layers"]
    ]
    return Trace(raw["tokens"], raw["experts_used"], layers, raw)


def _metrics(text: str) -> dict[str, float]:
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    pairs = (line.rsplit(" ", 1) for line in lines)
    return {name: float(value) for name, value in pairs}


def _command(arguments: list[str], progress: Callable[[str], None] | None) -> Reply:
    """Runs the command and returns the JSON that it prints."""
    with tempfile.TemporaryFile("w+") as answer:
        child = subprocess.Popen(
            [command_path(), *arguments], stdout=answer, stderr=subprocess.PIPE, text=True
        )
        printed: list[str] = []
        with child:
            assert child.stderr is not None
            for line in child.stderr:
                printed.append(line.rstrip())
                if progress is not None:
                    progress(line.rstrip())
        answer.seek(0)
        text = answer.read()
    if text.strip():
        reply: Reply = _read(_object, text)
        return reply
    raise SidecarError("\n".join(printed).removeprefix("Error: "))
