"""Compile the CPU kernels with the machine's own compiler, keyed by sources, flags and the CPU's instruction set.

`python -m kernels.cpu.build` builds; loading builds by itself when the library is missing. The library lies beside this
file, or in the user's cache folder where this one cannot be written. Needs only g++ (a few seconds), no torch headers.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE_DIR = Path(__file__).parent / "src"
MAIN_SOURCE = "decoder.cpp"
COMPILERS = ("g++", "c++")
# Contraction off: a product and a sum are fused only where the source says so, alike in every instance of a template.
FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-pthread", "-shared", "-fPIC", "-w")
COMPILE_TIMEOUT_S = 300.0


class BuildError(Exception):
    """The kernels cannot be compiled here: no compiler, or it failed."""


def library_name() -> str:
    """The file name that belongs to these sources on this CPU."""
    digest = hashlib.blake2b(digest_size=8)
    for source in sorted(SOURCE_DIR.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update(repr((FLAGS, platform.machine(), _cpu_flags())).encode())
    return f"libkvmesh_cpu-{digest.hexdigest()}.so"


def _cpu_flags() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def cache_dirs() -> tuple[Path, Path]:
    """Where a library is looked for, and written to if possible, in this order."""
    return Path(__file__).parent, Path.home() / ".cache" / "kvmesh"


def find_or_build() -> Path:
    """The library's path, compiled now if it is missing. Raises BuildError."""
    name = library_name()
    for folder in cache_dirs():
        if (folder / name).exists():
            return folder / name
    return build(name)


def build(name: str) -> Path:
    """Compile into the first writable folder; a half-written file is never visible under the final name."""
    compiler = next((path for path in map(shutil.which, COMPILERS) if path), None)
    if compiler is None:
        raise BuildError("no C++ compiler found (g++ or c++)")
    folder = _writable_dir()
    handle, temporary = tempfile.mkstemp(suffix=".so.tmp", dir=folder)
    os.close(handle)
    try:
        _compile(compiler, temporary)
        os.chmod(temporary, 0o755)
        os.replace(temporary, folder / name)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return folder / name


def _writable_dir() -> Path:
    package, cache = cache_dirs()
    if os.access(package, os.W_OK):
        return package
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"no folder to write the kernels to: {error}") from error
    return cache


def _compile(compiler: str, output: str) -> None:
    command = [compiler, *FLAGS, str(SOURCE_DIR / MAIN_SOURCE), "-o", output]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{compiler} failed: {error.stderr.strip()[:500]}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler} took longer than {COMPILE_TIMEOUT_S:.0f} s") from error


if __name__ == "__main__":
    print(find_or_build())
