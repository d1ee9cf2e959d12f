"""A mesh of `kvmesh up` for one measurement, its processes and their metrics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from services.cli.ports import free_ports

_COMMAND_TIMEOUT_S = 300.0
_METRICS_TIMEOUT_S = 10.0
_OURS = ("KVMESH_", "REDIS_")


class LocalMesh:
    """A running mesh whose supervisor keeps its state in a folder. environment: of its processes."""

    def __init__(self, folder: Path, port: int, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.port = port
        self._environment = environment
        self.processes: list[dict[str, Any]] = json.loads(self.kvmesh("ps", "--json"))

    def kvmesh(self, *arguments: str) -> str:
        """What a command prints. Raises RuntimeError when it fails."""
        return run_kvmesh(self.folder, self._environment, *arguments)

    def total(self, kind: str, metric: str, label: str = "") -> float:
        """A metric's sum over the processes of a kind, where its labels have `label`; 0 where none has it."""
        return sum(_sum(one["metrics"], metric, label) for one in self.processes if one["kind"] == kind)

    def pids(self) -> dict[str, int]:
        """Every process, as `pids_of` names them."""
        return pids_of(self.processes)


@contextmanager
def local_mesh(*flags: str, environment: Mapping[str, str] | None = None) -> Iterator[LocalMesh]:
    """As `started`, with what is known of its processes."""
    with started(flags, environment or {}) as (folder, port, given):
        yield LocalMesh(folder, port, given)


@contextmanager
def started(flags: Sequence[str], environment: Mapping[str, str]) -> Iterator[tuple[Path, int, Mapping[str, str]]]:
    """`kvmesh up` with these flags on a free port, stopped at the end: its state folder, HTTP port and environment.

    The caller's settings do not count. Raises RuntimeError.
    """
    given = {key: value for key, value in os.environ.items() if not key.startswith(_OURS)} | dict(environment)
    with tempfile.TemporaryDirectory(prefix="kvm-") as name:
        folder, port = Path(name), next(free_ports())
        run_kvmesh(folder, given, "up", "--detach", "--http-port", str(port), *flags)
        try:
            yield folder, port, given
        finally:
            run_kvmesh(folder, given, "down")


def pids_of(processes: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Of what `kvmesh ps --json` tells: all that run, a worker's children as NAME/ROLE."""
    found: dict[str, int] = {}
    for one in processes:
        if one["pid"]:
            found[one["name"]] = one["pid"]
        found |= {f"{one['name']}/{child['role']}": child["pid"] for child in one["children"]}
    return found


def run_kvmesh(folder: Path, environment: Mapping[str, str], *arguments: str) -> str:
    """What a command on the mesh of this state folder prints. Raises RuntimeError when it fails."""
    command = (sys.executable, "-m", "services.cli", *arguments, "--state", str(folder))
    done = subprocess.run(
        command, env=dict(environment), capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"kvmesh {arguments[0]}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _sum(address: str, metric: str, label: str) -> float:
    try:
        with urlopen(f"http://{address}/metrics", timeout=_METRICS_TIMEOUT_S) as response:
            lines = response.read().decode().splitlines()
    except OSError:
        # It has been told to end, or starts anew.
        return 0.0
    found = (line for line in lines if line.startswith((f"{metric}{{", f"{metric} ")) and label in line)
    return sum(float(line.rpartition(" ")[2]) for line in found)
