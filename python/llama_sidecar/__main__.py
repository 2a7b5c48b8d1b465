"""The command, as `python -m llama_sidecar`."""

from ._files import main

main()
