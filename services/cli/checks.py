"""The checks of `kvmesh doctor`. Each starts or imports the real thing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deploy.envoy.bootstrap import bootstrap_json
from deploy.envoy.settings import Address, EnvoySettings
from kernels.cpu.build import COMPILERS
from services.cli.binaries import MissingBinaryError, envoy_binary, valkey_binary
from services.cli.ports import free_ports, is_free
from services.common.models import DEFAULT_MODEL, resolve_model
from services.common.settings import ConfigurationError

_MODULES = ("torch", "ucxx", "tokenizers", "gguf", "grpc", "redis", "kernels")
_TIMEOUT_S = 60.0
_MIN_SHARED_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Check:
    """One finding."""

    name: str
    passed: bool
    detail: str


def run_checks() -> Iterator[Check]:
    """All checks, one after the other."""
    yield from (_machine(), _shared_memory(), _port(8080))
    yield from (_module(name) for name in _MODULES)
    yield _compiler()
    yield _guarded("model", lambda: str(resolve_model(DEFAULT_MODEL).path))
    yield _guarded("envoy", _envoy_starts)
    yield _guarded("valkey", _valkey_starts)
    yield _cuda()


def _machine() -> Check:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    python = sys.version.split()[0]
    detail = f"{os.cpu_count()} cores, {memory / 2**30:.0f} GiB, {sys.platform}, Python {python}"
    return Check("machine", sys.platform == "linux" and sys.version_info >= (3, 11), detail)


def _shared_memory() -> Check:
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    return Check("/dev/shm", free >= _MIN_SHARED_BYTES, f"{free / 2**20:.0f} MiB free")


def _port(port: int) -> Check:
    free = is_free("127.0.0.1", port)
    return Check("port", True, f"{port} is {'free' if free else 'taken: give `kvmesh up` another --http-port'}")


def _module(name: str) -> Check:
    """In a process of its own: some of them leave threads behind."""
    code = f"import {name}; print(getattr({name}, '__version__', ''))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if result.returncode == 0:
        return Check(name, True, result.stdout.strip() or "imports")
    return Check(name, False, (result.stderr.strip().splitlines() or ["does not import"])[-1])


def _compiler() -> Check:
    """Absence is no failure: plain torch serves, slower."""
    found = next((path for path in map(shutil.which, COMPILERS) if path), None)
    return Check("compiler", True, found or f"none ({' or '.join(COMPILERS)}): workers compute in plain torch, slower")


def _guarded(name: str, find: Callable[[], str]) -> Check:
    try:
        return Check(name, True, find())
    except (MissingBinaryError, ConfigurationError, OSError, subprocess.SubprocessError) as error:
        return Check(name, False, str(error))


def _version(binary: Path, flag: str) -> str:
    result = subprocess.run([binary, flag], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    return " ".join(result.stdout.split())


def _envoy_starts() -> str:
    """Have it load the configuration that a mesh would give it."""
    binary, ports = envoy_binary(), free_ports()
    admin, listen, gateway = (Address("127.0.0.1", next(ports)) for _ in range(3))
    with tempfile.TemporaryDirectory() as folder:
        configuration = Path(folder) / "envoy.json"
        configuration.write_text(bootstrap_json(EnvoySettings(listen=listen, admin=admin, gateways=(gateway,))))
        command = [str(binary), "--mode", "validate", "-c", str(configuration)]
        subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=True)
    return _version(binary, "--version").rpartition("version: ")[2]


def _valkey_starts() -> str:
    """Start it on a free port and wait until it listens."""
    binary, port = valkey_binary(), next(free_ports())
    with tempfile.TemporaryDirectory() as folder:
        command = [str(binary), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + _TIMEOUT_S
            while is_free("127.0.0.1", port):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise OSError(f"{binary} does not start")
                time.sleep(0.02)
        finally:
            process.kill()
            process.wait()
    return _version(binary, "--version")


def _cuda() -> Check:
    """Absence of a GPU is no failure: the CPU serves."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'none; --device cpu')"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    return Check("gpu", True, result.stdout.strip() or "unknown: torch does not import")
