"""Changes, inspects and speeds up a llama.cpp program that is already built.

The package has the command `llama-sidecar`, the drop-in for programs that load llama.cpp as a shared library, and the C
library with its header. This module finds these files, and talks to a program that runs with the drop-in.

>>> import llama_sidecar
>>> llama_sidecar.run(["--version"], capture_output=True, text=True).stdout.split()[0]
'llama-sidecar'
>>> llama_sidecar.preload_path().name
'libllama_sidecar_preload.so'

A program gets the drop-in by `llama-sidecar run`, or by `LD_PRELOAD` with the path above. Then:

>>> sidecar = llama_sidecar.Sidecar("/tmp/llama.sock")     # of: llama-sidecar run --hotswap --socket /tmp/llama.sock -- ...
>>> sidecar.status()["models"][0]["files"]                 # doctest: +SKIP
['/models/model.gguf']
"""

from ._files import command_path, include_path, library_path, preload_path, run
from ._sidecar import Layer, Sidecar, SidecarError, Trace, Unreachable

__all__ = [
    "Layer",
    "Sidecar",
    "SidecarError",
    "Trace",
    "Unreachable",
    "command_path",
    "include_path",
    "library_path",
    "preload_path",
    "run",
]
