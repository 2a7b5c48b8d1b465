"""Runs a notebook, and checks what it found.

    python3 notebook.py NOTEBOOK

The variables of the notebook's first cell are in the environment.
"""

import re
import sys

import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
assert not any(cell.get("outputs") for cell in notebook.cells), "the notebook is kept without outputs"
NotebookClient(notebook, timeout=600, kernel_name="python3").execute()

outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
text = "".join(output.get("text", "") for output in outputs)
found = re.findall(r"(\w+): [\d.]+ MiB, divergence (-?[\d.]+)", text)
divergences = {name: float(value) for name, value in found}
assert list(divergences) == ["q8_0", "q4_K", "q2_K"], text
assert divergences["q8_0"] < divergences["q4_K"] < divergences["q2_K"], text
pictures = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
assert len(pictures) == 1 and len(pictures[0]) > 10_000, [len(picture) for picture in pictures]
assert "the program ended with 0" in text, text
print("tune_a_layer.ipynb:", " ".join(f"{name} {value}" for name, value in divergences.items()))
