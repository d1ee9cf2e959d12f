"""Faults of `bench.chaos`: a worker or one of its children killed, stopped or cut off, in a network of its own.

A cut drops all packets to and from the worker's gRPC port; it lies in a network namespace that ends with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_CLONE_NEWNET = 0x40000000
_CUT_S = 4.0
_POLL_S = 0.5


def own_network() -> bool:
    """Move this process, and what it starts, to a fresh network with a loopback; False where that is not allowed."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("iptables")):
        return False
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        return False
    subprocess.run(("ip", "link", "set", "lo", "up"), check=True, timeout=10)
    return True


@dataclass(frozen=True, slots=True)
class Fault:
    """One that was made. at_s: of the monotonic clock."""

    kind: str
    worker: str
    part: str
    at_s: float


@dataclass(slots=True)
class Faults:
    """Makes a fault every `every_s` seconds whenever two workers are ready. processes: what `kvmesh ps` tells."""

    processes: Callable[[], list[dict[str, Any]]]
    every_s: float
    can_cut: bool
    rng: random.Random
    made: list[Fault] = field(default_factory=list)

    async def run(self) -> None:
        """Until cancelled; a cut is mended then."""
        while True:
            await asyncio.sleep(self.every_s)
            ready = await asyncio.to_thread(self._ready_workers)
            await self._strike(self.rng.choice(ready))

    def _ready_workers(self) -> list[dict[str, Any]]:
        """At least two; waits for them."""
        while len(ready := self._ready_now()) < 2:
            time.sleep(_POLL_S)
        return ready

    def _ready_now(self) -> list[dict[str, Any]]:
        return [one for one in self.processes() if one["kind"] == "worker" and one["ready"]]

    async def _strike(self, worker: dict[str, Any]) -> None:
        parts = {"front": worker["pid"], **{child["role"]: child["pid"] for child in worker["children"]}}
        kind = self.rng.choice(("kill", "stop", "cut") if self.can_cut else ("kill", "stop"))
        part = "network" if kind == "cut" else self.rng.choice(sorted(parts))
        self.made.append(Fault(kind, worker["name"], part, time.monotonic()))
        if kind == "cut":
            await _cut(worker["address"].rpartition(":")[2])
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(parts[part], signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


async def _cut(port: str) -> None:
    rules = [("INPUT", "-p", "tcp", side, port, "-j", "DROP") for side in ("--dport", "--sport")]
    try:
        for rule in rules:
            await asyncio.to_thread(_iptables, "-I", *rule)
        await asyncio.sleep(_CUT_S)
    finally:
        _iptables("-F", "INPUT")


def _iptables(*arguments: str) -> None:
    subprocess.run(("iptables", "-w", *arguments), check=True, capture_output=True, timeout=10)
