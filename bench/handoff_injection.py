"""Faults of `bench.handoff_faults`: what can go wrong with a handoff or a move, when, and to whom.

A fault is an action, a moment and a victim. Moments are of one long prompt that two workers share: before it is
computed, while it is, when its first token has come, and some time after that, when its output goes on elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.chaos_faults import cut_ports
from bench.chaos_streams import Answer
from bench.fault_mesh import LocalMesh
from bench.ports_of import listening_ports

MOMENTS = ("before", "prefill", "first token", "output")
ROLES = ("prefill", "decode")
# Seconds, at least and at most.
_STOP_S, _CUT_S, _LATER_S = (0.2, 2.5), (0.5, 2.5), (0.0, 0.3)
_MOMENT_TIMEOUT_S = 30.0
# How often each is drawn. Those that cost a start come less often than they might.
ACTIONS: dict[str, int] = {
    "kill front": 3,
    "kill engine": 2,
    "kill mover": 2,
    "leave": 3,
    "stop front": 3,
    "stop engine": 3,
    "stop mover": 3,
    "cut gRPC": 3,
    "cut pulls": 4,
    "client leaves": 5,
    "deadline passes": 5,
    "gateway leaves": 1,
}
_OF_CLIENTS = ("client leaves", "deadline passes")
_NEEDS_ANOTHER = ("kill", "leave")


@dataclass(frozen=True, slots=True)
class Fault:
    """One to make. role: of the worker that it strikes, empty for none."""

    action: str
    moment: str
    role: str

    def __str__(self) -> str:
        return " / ".join(part for part in (self.action, self.role, self.moment) if part)

    @property
    def is_of_client(self) -> bool:
        """Whether the struck request ends without its answer, as its client wants."""
        return self.action in _OF_CLIENTS


def draw(rng: random.Random, *, can_cut: bool) -> Fault:
    """A random one. can_cut: whether links can be cut here."""
    names = [name for name in ACTIONS if can_cut or not name.startswith("cut")]
    action = rng.choices(names, [ACTIONS[name] for name in names])[0]
    role = "" if action in _OF_CLIENTS or action == "gateway leaves" else rng.choice(ROLES)
    return Fault(action, rng.choice(MOMENTS), role)


@dataclass(frozen=True, slots=True)
class Struck:
    """The request that a fault is aimed at: its client's task and what that has heard."""

    answer: Answer
    client: asyncio.Task[Answer]


class Injector:
    """Makes faults in one mesh. roles: of its workers, by name."""

    def __init__(self, mesh: LocalMesh, roles: dict[str, str], rng: random.Random) -> None:
        self._mesh = mesh
        self._roles = roles
        self._rng = rng

    async def strike(self, fault: Fault, send: Callable[[], Struck]) -> Struck:
        """Send the request and make the fault at its moment; returns when what was stopped or cut works again."""
        if fault.moment == "before":
            victim = await self._victim(fault, None)
            making = asyncio.create_task(self._make(fault, victim, None))
            struck = send()
            if fault.action == "client leaves":
                struck.client.cancel()
        else:
            # Whom to strike is asked beforehand: that takes longer than a prompt.
            processes = await self._mesh.processes()
            struck = send()
            await self._await_moment(fault.moment, struck)
            making = asyncio.create_task(self._make(fault, self._choose(fault, processes, struck.answer), struck))
        await making
        return struck

    async def _await_moment(self, moment: str, struck: Struck) -> None:
        if moment == "prefill":
            await asyncio.sleep(self._rng.uniform(*_LATER_S))
            return
        begun = asyncio.create_task(struck.answer.begun.wait())
        await asyncio.wait({begun, struck.client}, timeout=_MOMENT_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        if moment == "output":
            await asyncio.sleep(self._rng.uniform(*_LATER_S))

    async def _victim(self, fault: Fault, answer: Answer | None) -> dict[str, Any] | None:
        return self._choose(fault, await self._mesh.processes(), answer)

    def _choose(
        self, fault: Fault, processes: Sequence[dict[str, Any]], answer: Answer | None
    ) -> dict[str, Any] | None:
        """Who has the request, if that can be told, else any of the role; None where the last one would be lost."""
        if fault.is_of_client:
            return None
        if fault.action == "gateway leaves":
            able = [one for one in processes if one["kind"] == "gateway" and one["ready"]]
        else:
            able = [one for one in processes if self._roles.get(one["name"]) == fault.role and one["ready"]]
        if len(able) < 2 and (fault.action == "gateway leaves" or fault.action.startswith(_NEEDS_ANOTHER)):
            return None
        named = [one for one in able if answer is not None and one["name"] == answer.worker]
        if named:
            return named[0]
        return self._rng.choice(able) if able else None

    async def _make(self, fault: Fault, victim: dict[str, Any] | None, struck: Struck | None) -> None:
        if fault.action == "client leaves" and struck is not None:
            struck.client.cancel()
        if victim is None:
            return
        verb, _, part = fault.action.partition(" ")
        if verb == "cut":
            await self._cut(victim, part)
        elif verb == "stop":
            await self._stop(_pid(victim, part))
        else:
            _signal(_pid(victim, part) if verb == "kill" else victim["pid"], _NUMBERS[fault.action.split(" ")[0]])

    async def _stop(self, pid: int) -> None:
        _signal(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(self._rng.uniform(*_STOP_S))
        finally:
            _signal(pid, signal.SIGCONT)

    async def _cut(self, victim: dict[str, Any], part: str) -> None:
        ports = (
            {int(victim["address"].rpartition(":")[2])} if part == "gRPC" else listening_ports(_pid(victim, "mover"))
        )
        await cut_ports(sorted(ports), self._rng.uniform(*_CUT_S))


_NUMBERS = {"kill": signal.SIGKILL, "leave": signal.SIGTERM, "gateway": signal.SIGTERM}


def _pid(worker: dict[str, Any], part: str) -> int:
    """Of a worker's process; 0 while there is none."""
    if part == "front":
        return int(worker["pid"] or 0)
    return next((int(child["pid"]) for child in worker["children"] if child["role"] == part), 0)


def _signal(pid: int, number: signal.Signals) -> None:
    if pid > 0:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
