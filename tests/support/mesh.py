"""A whole mesh of real processes, started by `kvmesh up` as an operator would."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from services.cli.listing import list_processes
from services.cli.state import StateDir
from tests.support.processes import clean_environment, free_port

KVMESH = (sys.executable, "-m", "services.cli")
MODEL = "smollm2-135m"


def wait_for(condition: Callable[[], bool], *, within_s: float, what: str) -> float:
    """Poll `condition` until it holds; seconds that took. Fails with `what` after `within_s`."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > within_s:
            raise AssertionError(f"not within {within_s} s: {what}")
        time.sleep(0.1)
    return time.monotonic() - start


@dataclass(frozen=True)
class Mesh:
    """A running mesh, its HTTP address and its state directory."""

    state: Path
    port: int
    env: dict[str, str]

    @property
    def url(self) -> str:
        """Root of the HTTP API, without /v1."""
        return f"http://127.0.0.1:{self.port}"

    def ps(self) -> list[dict[str, Any]]:
        """Every process of the mesh as `kvmesh ps --json` tells it, without a process that must start for it."""
        with ThreadPoolExecutor(1) as thread:  # The caller's may run an event loop.
            return thread.submit(asyncio.run, list_processes(StateDir(self.state))).result()

    def process(self, name: str) -> dict[str, Any]:
        """The entry of one process."""
        return next(entry for entry in self.ps() if entry["name"] == name)

    def published(self, name: str) -> dict[str, Any]:
        """What the supervisor last told of one process, which nobody is asked for: its pid and addresses."""
        processes = StateDir(self.state).snapshot()["processes"]
        return next(entry for entry in processes if entry["name"] == name)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The entries of one kind."""
        return [entry for entry in self.ps() if entry["kind"] == kind]

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to one process."""
        os.kill(self.published(name)["pid"], number)

    def replace(self, name: str) -> None:
        """Kill one process, and wait until the supervisor has started another one and everything is ready."""
        before = self.published(name)["pid"]
        self.kill(name)
        wait_for(lambda: self.published(name)["pid"] not in (None, before), within_s=60, what="a new process")
        self.wait_ready()

    def metrics(self, name: str) -> dict[str, float]:
        """Samples of a process's `/metrics`, by series name with labels."""
        return scrape(self.published(name)["metrics"])

    def wait_ready(self, within_s: float = 120) -> None:
        """Wait until every process says that it is ready."""
        wait_for(lambda: all(entry["ready"] for entry in self.ps()), within_s=within_s, what=f"ready: {self.ps()}")

    def logs(self) -> str:
        """All log files, for a failure's report and for searching what must not be in them."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.state.rglob("*.log")))

    def kvmesh(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command line on this mesh. Raises CalledProcessError when it fails."""
        return subprocess.run(
            [*KVMESH, *arguments, "--state", str(self.state)],
            env=self.env,
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        )


def scrape(address: str) -> dict[str, float]:
    """Samples of a Prometheus endpoint "host:port", by series name with labels."""
    with urlopen(f"http://{address.removeprefix('http://').removesuffix('/metrics')}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in samples}


def total(samples: dict[str, float], name: str, **labels: str) -> float:
    """Sum of the series of one metric whose labels include `labels`."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        value
        for series, value in samples.items()
        if re.split(r"[{ ]", series)[0] == name and all(label in series for label in wanted)
    )


@contextmanager
def running_mesh(state: Path, *options: str, env: dict[str, str] | None = None) -> Iterator[Mesh]:
    """`kvmesh up --detach` with `options`, ready; taken down at the end."""
    mesh = Mesh(state=state, port=free_port(), env=clean_environment(**(env or {})))
    up = [*KVMESH, "up", "--detach", "--http-port", str(mesh.port), "--state", str(state), *options]
    started = subprocess.run(up, env=mesh.env, capture_output=True, text=True, timeout=180, check=False)
    try:
        assert started.returncode == 0, f"{started.stdout}\n{started.stderr}\n{mesh.logs()[-4000:]}"
        yield mesh
    finally:
        mesh.kvmesh("down")
