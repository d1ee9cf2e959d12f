"""Faults of `bench.chaos`: processes and children of workers killed, stopped or cut off, in a network of their own.

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
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.fault_mesh import LocalMesh

_CLONE_NEWNET = 0x40000000
_CUT_S = 4.0
_POLL_S = 0.5
_LEAST_READY = 2


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
    process: str
    part: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Target:
    """A process to strike, or a child of one. part: its role. address: of its gRPC port where that can be cut off."""

    process: str
    part: str
    pid: int
    address: str


@dataclass(slots=True)
class Faults:
    """Makes a fault every `every_s` seconds of a random process of `kinds`, where two of its kind are ready.

    kinds: "worker" and "child" (of a worker), "router", "gateway", "kvstore".
    """

    mesh: LocalMesh
    kinds: Sequence[str]
    every_s: float
    can_cut: bool
    rng: random.Random
    made: list[Fault] = field(default_factory=list)

    async def run(self) -> None:
        """Until cancelled; a cut is mended then."""
        while True:
            await asyncio.sleep(self.every_s)
            while not (able := targets(await self.mesh.processes(), self.kinds)):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
            # A kind of process is drawn first: there are more children than others.
            kind = self.rng.choice(sorted(able))
            await self._strike(self.rng.choice(able[kind]))

    async def _strike(self, target: Target) -> None:
        kind = self.rng.choice(("kill", "stop", "cut") if self.can_cut and target.address else ("kill", "stop"))
        part = "network" if kind == "cut" else target.part
        self.made.append(Fault(kind, target.process, part, time.monotonic()))
        if kind == "cut":
            await cut_ports([int(target.address.rpartition(":")[2])], _CUT_S)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(target.pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


def targets(processes: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> dict[str, list[Target]]:
    """Whom to strike now, by kind; of what is there once, nobody. processes: as `kvmesh ps` tells them."""
    found: dict[str, list[Target]] = {}
    ready = [one for one in processes if one["ready"]]
    counts = Counter(one["kind"] for one in ready)
    for one in ready:
        if counts[one["kind"]] < _LEAST_READY:
            continue
        if one["kind"] in kinds:
            address = one["address"] if one["kind"] == "worker" else ""
            found.setdefault(one["kind"], []).append(Target(one["name"], one["kind"], one["pid"], address))
        if one["kind"] == "worker" and "child" in kinds:
            children = [Target(one["name"], child["role"], child["pid"], "") for child in one["children"]]
            found.setdefault("child", []).extend(children)
    return {kind: some for kind, some in found.items() if some}


async def cut_ports(ports: Sequence[int], seconds: float) -> None:
    """Drop what goes to and comes from these ports for so long. One cut at a time."""
    rules = [("INPUT", "-p", "tcp", side, str(port), "-j", "DROP") for port in ports for side in ("--dport", "--sport")]
    try:
        for rule in rules:
            await asyncio.to_thread(_iptables, "-I", *rule)
        await asyncio.sleep(seconds)
    finally:
        _iptables("-F", "INPUT")


def _iptables(*arguments: str) -> None:
    subprocess.run(("iptables", "-w", *arguments), check=True, capture_output=True, timeout=10)
