"""A swap in a program that uses llama-cpp-python, with the drop-in of the package.

    python3 in_llama_cpp_python.py PYTHON PROGRAM MODEL OTHER

PROGRAM is hosts/python/llama_cpp_python.py, PYTHON has llama-cpp-python. OTHER has matrices in other types.
"""

import os
import subprocess
import sys
import tempfile

from llama_sidecar import Sidecar, preload_path

python, program, model, other = sys.argv[1:]
socket = os.path.join(tempfile.mkdtemp(), "socket")
environment = {
    **os.environ,
    "LD_PRELOAD": str(preload_path()),
    "LLAMA_HOTSWAP_ENABLED": "1",
    "LLAMA_SIDECAR_CONTROL": socket,
}
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
with subprocess.Popen([python, program, model], env=environment, **pipes) as child:

    def text():
        child.stdin.write("text 12\n")
        child.stdin.flush()
        return child.stdout.readline()

    assert child.stdout.readline() == "ready\n"
    before = text()
    sidecar = Sidecar(socket)
    (report,) = sidecar.swap(r"blk\..*", other)
    assert report["swapped"] > 0, report
    changed = text()
    (report,) = sidecar.undo()
    assert report["returned"] > 0 and text() == before, report
    child.stdin.write("end\n")
    child.stdin.close()
    child.stdout.read()
assert child.returncode == 0, child.returncode
with subprocess.Popen([python, program, other], **pipes) as fresh:
    fresh.stdout.readline()
    fresh.stdin.write("text 12\nend\n")
    fresh.stdin.close()
    expected = fresh.stdout.readline()
assert changed == expected, (changed, expected)
print(f"{report['returned']} tensors swapped and returned in llama-cpp-python")
