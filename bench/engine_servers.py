"""The servers that `bench.engine_peers` compares, each with its start, its requests and its end.

The mesh is started as users start it: Envoy, gateway, router, worker, kvstore and Valkey. vLLM's CPU build and
llama-cpp-python live in virtual environments of their own; each is given what its documentation recommends for this
case. All stand at once and are asked one at a time, so an idle one must not take time: `cpu_s` shows that.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from services.common.models import DEFAULT_MODEL, resolve_model

# vLLM compiles for minutes at its first start.
_START_TIMEOUT_S = 900.0
_STOP_TIMEOUT_S = 20.0
_POLL_S = 0.25
# Found on Debian; the allocator that vLLM's documentation asks for.
_TCMALLOC = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
_LIBRARY_FOLDERS = (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib/aarch64-linux-gnu"), Path("/usr/lib64"))
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. arithmetic: weights, activations and what exact mode it has. pids: all its processes."""

    name: str
    arithmetic: str
    url: str
    pids: tuple[int, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)

    def cpu_s(self) -> float:
        """CPU seconds that its processes have used."""
        return sum(map(_cpu_s, self.pids))


@contextlib.contextmanager
def mesh(
    folder: Path,
    port: int,
    flags: Sequence[str] = (),
    *,
    name: str = "kvmesh",
    weights: str = "BF16",
) -> Iterator[Server]:
    """A local mesh with one worker, state below `folder`."""
    state = folder / name.replace(" ", "-")
    _kvmesh(state, "up", "--detach", "--http-port", str(port), *flags)
    try:
        processes = json.loads(_kvmesh(state, "ps", "--json"))
        pids = [process["pid"] for process in processes]
        pids += [child["pid"] for process in processes for child in process["children"]]
        arithmetic = f"{weights} weights, BF16 KV, exact"
        yield Server(name, arithmetic, f"http://127.0.0.1:{port}", tuple(pids))
    finally:
        _kvmesh(state, "down")


@contextlib.contextmanager
def vllm(venv: Path, model_folder: Path, port: int, log: Path, *, cores: str) -> Iterator[Server]:
    """vLLM's CPU build. cores: for its OpenMP threads; by itself it leaves one core to its front end."""
    preload = [*_tcmalloc(), *map(str, venv.glob("lib/libiomp5.so"))]
    environment = {
        "LD_PRELOAD": ":".join(preload),
        "KMP_BLOCKTIME": "0",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [str(venv / "bin" / "python"), "-m", "vllm.entrypoints.cli.main", "serve", str(model_folder)]
    command += ["--served-model-name", DEFAULT_MODEL, "--dtype", "bfloat16", "--max-model-len", "4096"]
    command += ["--enable-prompt-tokens-details"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    with _process(command, environment, log, port) as pids:
        yield Server("vLLM", "BF16 weights, BF16 KV, not exact", f"http://127.0.0.1:{port}", pids)


@contextlib.contextmanager
def llama_cpp(venv: Path, port: int, log: Path, *, end_tokens: Sequence[int]) -> Iterator[Server]:
    """llama-cpp-python's server on the GGUF file itself. It has no `ignore_eos`; a bias keeps the ends away."""
    path = resolve_model(DEFAULT_MODEL).path
    command = [str(venv / "bin" / "python"), "-m", "llama_cpp.server", "--model", str(path)]
    command += ["--model_alias", DEFAULT_MODEL, "--n_ctx", "4096", "--interrupt_requests", "false"]
    command += ["--n_threads", str(os.cpu_count()), "--n_threads_batch", str(os.cpu_count())]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    extra = {"logit_bias": {str(token): -100 for token in end_tokens}}
    with _process(command, {}, log, port) as pids:
        yield Server(
            "llama.cpp", "Q4_1 weights, F16 KV, one request at a time", f"http://127.0.0.1:{port}", pids, extra
        )


@contextlib.contextmanager
def _process(command: list[str], environment: dict[str, str], log: Path, port: int) -> Iterator[tuple[int, ...]]:
    """Run until the end of the context; all process ids once it answers. Raises RuntimeError when it does not."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=clean | environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait_serving(process, f"http://127.0.0.1:{port}/v1/models", log)
        yield tuple(_session(process.pid))
    finally:
        # It leads a process group of its own.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_TIMEOUT_S)


def _wait_serving(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            break
        with contextlib.suppress(URLError, OSError), urlopen(url, timeout=5):
            return
        time.sleep(_POLL_S)
    raise RuntimeError(f"{process.args!r} does not serve: {log.read_text(errors='replace')[-500:]}")


def _session(leader: int) -> Iterator[int]:
    """Processes of the session that `leader` leads."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.getsid(int(entry.name)) == leader:
                    yield int(entry.name)


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _tcmalloc() -> list[str]:
    found = (str(folder / name) for folder in _LIBRARY_FOLDERS for name in _TCMALLOC if (folder / name).exists())
    return [first for first in [next(found, "")] if first]


def _kvmesh(state: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "services.cli", *arguments, "--state", str(state)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=_START_TIMEOUT_S)
    return done.stdout
