"""Builds the wheel and the source distribution (PEP 517), without other packages.

    python3 build_backend.py TREE GLIBC_MACHINE OUT

packs an installed tree, as `cargo xtask install` makes it, and the sources. The same files give the same bytes.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

try:
    import tomllib
except ImportError:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
# The first time that a zip file can have, and that of entries without another.
EARLIEST = 315532800
# Files of the installed tree, and their names in the package. A wheel has no links.
FILES = {
    "bin/llama-sidecar": "bin/llama-sidecar",
    "lib/libllama_sidecar_preload.so": "lib/libllama_sidecar_preload.so",
    "lib/libllama_sidecar.so": "lib/libllama_sidecar.so.0",
    "include/llama_sidecar.h": "include/llama_sidecar.h",
    "include/llama_sidecar_hooks.h": "include/llama_sidecar_hooks.h",
}
# What is built on a machine is for this machine.
LOCAL = f"linux_{platform.machine()}"
NOTICES = "share/doc/llama-sidecar"


def _project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _version() -> str:
    return tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]


def _epoch() -> int:
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if epoch is None:
        log = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
        done = subprocess.run(log, capture_output=True, text=True)
        epoch = done.stdout.strip() if done.returncode == 0 else EARLIEST
    return max(int(epoch), EARLIEST)


def _metadata() -> str:
    project = _project()
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {project['name']}",
        f"Version: {_version()}",
        f"Summary: {project['description']}",
        f"License-Expression: {project['license']}",
        *(f"License-File: {name}" for name in project["license-files"]),
        f"Keywords: {','.join(project['keywords'])}",
        *(f"Classifier: {name}" for name in project["classifiers"]),
        f"Requires-Python: {project['requires-python']}",
        "Description-Content-Type: text/markdown",
    ]
    return "\n".join(lines) + "\n\n" + (ROOT / project["readme"]).read_text()


def _name() -> str:
    return f"llama_sidecar-{_version()}"


def _info(tag: str) -> dict[str, str]:
    """The files of dist-info."""
    scripts = "".join(f"{name} = {target}\n" for name, target in _project()["scripts"].items())
    return {
        "METADATA": _metadata(),
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: llama-sidecar\nRoot-Is-Purelib: false\nTag: {tag}\n",
        "entry_points.txt": f"[console_scripts]\n{scripts}",
        "licenses/LICENSE": (ROOT / "LICENSE").read_text(),
    }


def _pack_wheel(tree: Path, system: str, out: Path) -> str:
    entries: dict[str, tuple[bytes, int]] = {}
    for path in sorted((ROOT / "python/llama_sidecar").iterdir()):
        if path.suffix == ".py" or path.name == "py.typed":
            entries[f"llama_sidecar/{path.name}"] = (path.read_bytes(), 0o644)
    for installed, name in FILES.items():
        mode = 0o755 if name.startswith(("bin/", "lib/")) else 0o644
        entries[f"llama_sidecar/{name}"] = ((tree / installed).read_bytes(), mode)
    info = f"{_name()}.dist-info"
    tag = f"py3-none-{system}"
    for name, text in _info(tag).items():
        entries[f"{info}/{name}"] = (text.encode(), 0o644)
    for name in ["THIRD-PARTY.txt", "rust-standard-library.html"]:
        if (tree / NOTICES / name).exists():
            entries[f"{info}/licenses/{name}"] = ((tree / NOTICES / name).read_bytes(), 0o644)
    record = "".join(f"{name},{_hash(data)},{len(data)}\n" for name, (data, _) in entries.items())
    entries[f"{info}/RECORD"] = (f"{record}{info}/RECORD,,\n".encode(), 0o644)

    file = f"{_name()}-{tag}.whl"
    time = _zip_time(_epoch())
    with zipfile.ZipFile(out / file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, (data, mode) in entries.items():
            entry = zipfile.ZipInfo(name, time)
            entry.create_system = 3
            entry.external_attr = (0o100000 | mode) << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED, 9)
    return file


def _hash(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return f"sha256={digest.decode().rstrip('=')}"


def _zip_time(epoch: int) -> tuple[int, int, int, int, int, int]:
    import datetime

    return datetime.datetime.fromtimestamp(epoch, datetime.timezone.utc).timetuple()[:6]


def _sources() -> list[str]:
    """Files of the repository, or of a source distribution."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True)
    if listed.returncode == 0:
        names = listed.stdout.decode().split("\0")
    else:
        names = (ROOT / "SOURCES.txt").read_text().split("\n")
    return sorted(name for name in names if name and (ROOT / name).is_file())


def build_sdist(sdist_directory: str, config_settings: object = None) -> str:
    name, epoch = _name(), _epoch()
    sources = _sources()
    texts = {"PKG-INFO": _metadata(), "SOURCES.txt": "\n".join(sources) + "\n"}
    file = f"{name}.tar.gz"
    with open(Path(sdist_directory) / file, "wb") as raw:
        with gzip.GzipFile("", "wb", 9, raw, epoch) as packed, tarfile.open(
            fileobj=packed, mode="w", format=tarfile.PAX_FORMAT
        ) as archive:
            entries = [(path, (ROOT / path).read_bytes()) for path in sources]
            entries += [(path, text.encode()) for path, text in texts.items()]
            for path, data in entries:
                entry = tarfile.TarInfo(f"{name}/{path}")
                entry.size, entry.mtime = len(data), epoch
                entry.mode = 0o755 if os.access(ROOT / path, os.X_OK) else 0o644
                archive.addfile(entry, io.BytesIO(data))
    return file


def prepare_metadata_for_build_wheel(directory: str, config_settings: object = None) -> str:
    folder = f"{_name()}.dist-info"
    for name, text in _info(f"py3-none-{LOCAL}").items():
        path = Path(directory) / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def build_wheel(
    wheel_directory: str, config_settings: object = None, metadata_directory: object = None
) -> str:
    with tempfile.TemporaryDirectory() as folder:
        install = ["cargo", "run", "--quiet", "--release", "-p", "xtask", "--", "install"]
        done = subprocess.run([*install, "--prefix", folder], cwd=ROOT)
        if done.returncode != 0:
            raise SystemExit("llama-sidecar is built with cargo: install Rust 1.90 or later, and gcc")
        return _pack_wheel(Path(folder), LOCAL, Path(wheel_directory))


if __name__ == "__main__":
    installed, system, target = sys.argv[1:]
    if re.fullmatch(r"\d+\.\d+_\w+", system) is None:
        raise SystemExit(f"a version of glibc with a machine is like 2.34_x86_64, not {system}")
    print(_pack_wheel(Path(installed), f"manylinux_{system.replace('.', '_')}", Path(target)))
    print(build_sdist(target))
