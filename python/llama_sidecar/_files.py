"""The files of the package, and the command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Sequence

_FOLDER = Path(__file__).resolve().parent


def _file(name: str) -> Path:
    path = _FOLDER / name
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: install the package llama-sidecar again")
    return path


def command_path() -> Path:
    """Returns the path of the program `llama-sidecar`."""
    return _file("bin/llama-sidecar")


def preload_path() -> Path:
    """Returns the path of the drop-in, for `LD_PRELOAD`."""
    return _file("lib/libllama_sidecar_preload.so")


def library_path() -> Path:
    """Returns the path of the C library, for programs that link it: gcc PROGRAM.c LIBRARY_PATH."""
    return _file("lib/libllama_sidecar.so.0")


def include_path() -> Path:
    """Returns the folder of `llama_sidecar.h`."""
    return _file("include/llama_sidecar.h").parent


def run(
    arguments: Sequence[str | os.PathLike[str]], **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Runs `llama-sidecar` with arguments and waits for its end. Options are those of `subprocess.run`.

    >>> run(["ctl", "ping", "--socket", "/nowhere"], capture_output=True).returncode
    1
    """
    return subprocess.run([command_path(), *arguments], **options)


def main() -> None:
    """Becomes the program `llama-sidecar`."""
    os.execv(command_path(), ["llama-sidecar", *sys.argv[1:]])
