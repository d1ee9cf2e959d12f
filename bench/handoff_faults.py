"""`python -m bench.handoff_faults --faults 500`: random faults of handoffs and moves, on real processes.

Two workers for prompts and two that answer, of a tiny random model, so that a fault costs about a second. In every
round some answers run, which makes the router hand long prompts over; one of two long prompts is struck by a random
fault at a random moment. Every request but one that its client left, or whose deadline passed, must say what it says
undisturbed. Every ten faults and at the end nothing may be held anywhere, and each pool has all its blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.chaos_faults import own_network
from bench.chaos_jobs import COMPLETIONS
from bench.chaos_streams import Answer, ask, difference, percentile
from bench.fault_mesh import Books, LocalMesh, dumped, local_mesh
from bench.handoff_injection import Fault, Injector, Struck, draw
from bench.kv_table import Machine
from bench.tiny_model import write_tiny_model

RESULTS = Path(__file__).parent / "results" / "handoff_faults.json"
_MODEL = "tiny"
_WORKERS = 2
_NUM_BLOCKS = 1600
_MESH = (
    *("--prefill-workers", str(_WORKERS), "--decode-workers", str(_WORKERS)),
    *("--gateways", "2", "--kvstores", "0", "--threads", "1"),
)
_ENVIRONMENT = {
    "KVMESH_MOVER_TRANSPORT": "ucx",
    # Links go over TCP, which can be cut.
    "UCX_TLS": "tcp",
    "KVMESH_WORKER_NUM_BLOCKS": str(_NUM_BLOCKS),
    "KVMESH_WORKER_STEP_TOKEN_BUDGET": "64",
    "KVMESH_GATEWAY_WORKER_SILENCE_S": "1.5",
    "KVMESH_GATEWAY_IDEMPOTENCY_WINDOW_S": "5",
    # One tenant has all faults.
    "KVMESH_GATEWAY_RETRY_BURST": "100000",
}
_RUNNING, _LONG, _KEYED_SHARE = 6, 2, 0.25
_RUNNING_TOKENS, _LONG_TOKENS, _LONG_WORDS = 160, 60, 500
_TEXTS = 6
_LOOK_EVERY = 10
_SETTLE_S, _READY_S, _LOOK_POLL_S = 40.0, 300.0, 0.2
# In which routers hear of the answers that run.
_REPORT_S = 0.25
_DEADLINE_S = (0.05, 1.0)
_BEGIN_S = 5.0


@dataclass(slots=True)
class Found:
    """What has happened. Each wrong answer and leak has a line."""

    faults: Counter[str] = field(default_factory=Counter)
    complete: int = 0
    ended_by_client: int = 0
    refusals: int = 0
    repeats: int = 0
    wrong: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    handoffs: Counter[str] = field(default_factory=Counter)
    pauses_s: list[float] = field(default_factory=list)
    looks: int = 0


class Rounds:
    """Rounds of requests and faults on one mesh. rng: of the faults and of which requests are made."""

    def __init__(self, mesh: LocalMesh, rng: random.Random, *, can_cut: bool) -> None:
        self.found = Found()
        self._mesh = mesh
        self._rng = rng
        self._can_cut = can_cut
        roles = ["prefill"] * _WORKERS + ["decode"] * _WORKERS
        self._injector = Injector(mesh, {f"worker-{number}": role for number, role in enumerate(roles)}, rng)
        self._names = itertools.count()
        self._expected: dict[tuple[str, int], Answer] = {}
        self._counted: dict[str, float] = {}

    async def learn(self) -> None:
        """What every text is when nothing happens. Raises RuntimeError when one fails."""
        for kind, text in itertools.product(("running", "long"), range(_TEXTS)):
            answer = await self._send(kind, text).client
            if not answer.done:
                raise RuntimeError(f"without any fault: {answer.error}")
            self._expected[kind, text] = answer

    async def run(self, faults: int) -> None:
        """So many faults, and looks in between and at the end."""
        for number in range(1, faults + 1):
            await self._round(draw(self._rng, can_cut=self._can_cut))
            if number % _LOOK_EVERY == 0:
                await self._look()
                _say(f"{number} faults, {self.found.complete} complete, wrong {len(self.found.wrong)}, "
                     f"leaks {len(self.found.leaks)}")  # fmt: skip
        await self._mesh.wait_ready(_READY_S)
        await self._look(is_last=True)

    async def _round(self, fault: Fault) -> None:
        # An answer that outlives its gateway's drain goes on at another only where its client can ask for it again.
        needs_key = fault.action == "gateway leaves"
        running = [self._send("running", self._rng.randrange(_TEXTS), is_keyed=needs_key) for _ in range(_RUNNING)]
        await self._begun(running)
        others = [self._send("long", self._rng.randrange(_TEXTS), is_keyed=needs_key) for _ in range(_LONG - 1)]
        deadline_s = self._rng.uniform(*_DEADLINE_S) if fault.action == "deadline passes" else None
        text, key = self._rng.randrange(_TEXTS), needs_key or self._rng.random() < _KEYED_SHARE
        struck = await self._injector.strike(
            fault, lambda: self._send("long", text, deadline_s=deadline_s, is_keyed=key and not fault.is_of_client)
        )
        self.found.faults[fault.action] += 1
        requests = [*running, *others, struck]
        await asyncio.gather(*(one.client for one in requests), return_exceptions=True)
        for one in requests:
            self._judge(one, fault, may_end=one is struck and fault.is_of_client)

    async def _begun(self, running: Sequence[Struck]) -> None:
        """Until all of them run, and routers have heard of it."""
        waits = [asyncio.create_task(one.answer.begun.wait()) for one in running]
        await asyncio.wait(waits, timeout=_BEGIN_S)
        for wait in waits:
            wait.cancel()
        await asyncio.sleep(_REPORT_S)

    def _send(self, kind: str, text: int, *, deadline_s: float | None = None, is_keyed: bool = False) -> Struck:
        """A request that shares no block with another, and says the same as those of its kind and text."""
        name = f"{kind}-{next(self._names)}"
        words = " ".join(str((text * 7919 + i * i) % 1000) for i in range(_LONG_WORDS if kind == "long" else 8))
        body: dict[str, Any] = {
            "model": _MODEL,
            "prompt": f"Case {text}: {words}",
            "max_tokens": _LONG_TOKENS if kind == "long" else _RUNNING_TOKENS,
            "ignore_eos": True,
            "temperature": float(text % 2),
            "seed": text,
            "n": 2 if text == 1 and kind == "long" else 1,
            "cache_salt": name,
            "stream": True,
        }
        headers = {} if deadline_s is None else {"grpc-timeout": f"{int(deadline_s * 1000)}m"}
        if is_keyed:
            headers["idempotency-key"] = name
        answer = Answer(text, kind)
        return Struck(answer, asyncio.create_task(ask(self._mesh.port, COMPLETIONS, body, answer, headers=headers)))

    def _judge(self, one: Struck, fault: Fault, *, may_end: bool) -> None:
        answer, found = one.answer, self.found
        found.refusals += answer.refusals
        found.repeats += answer.repeats
        if may_end and (one.client.cancelled() or not answer.done):
            found.ended_by_client += 1
            return
        differs = answer.error or difference(answer, self._expected[answer.kind, answer.job])
        if differs:
            found.wrong.append(f"{fault}: {answer.kind}: {differs[:160]}")
            _say(found.wrong[-1])
            return
        found.complete += 1
        found.pauses_s.append(answer.pause_s)

    async def _look(self, *, is_last: bool = False) -> None:
        """Whether anything is held. Who starts anew holds nothing; at the end everybody must answer."""
        books = await self._mesh.settled(_SETTLE_S) if is_last else await self._held_nowhere()
        self.found.looks += 1
        leaks = [f"{name} = {value:g}" for name, value in books.held.items()]
        leaks += [f"{name}: {blocks:g} blocks" for name, blocks in books.pools.items() if blocks != _NUM_BLOCKS]
        if is_last:
            leaks += [f"{name} does not answer" for name in books.silent]
        for leak in leaks:
            _say(leak)
        self.found.leaks += leaks
        await self._count_handoffs()

    async def _held_nowhere(self) -> Books:
        ends_s = time.monotonic() + _SETTLE_S
        while (books := await self._mesh.books()).held and time.monotonic() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_POLL_S)
        return books

    async def _count_handoffs(self) -> None:
        """What gateways count since the last look; what one counted that has gone is lost."""
        for name in ("started", "completed", "source_failed", "target_failed", "abandoned"):
            now = await self._mesh.total("gateway", "kvmesh_gateway_handoffs_total", outcome=name)
            before = self._counted.get(name, 0.0)
            self.found.handoffs[name] += int(now - before if now >= before else now)
            self._counted[name] = now


def main(argv: Sequence[str]) -> int:
    """Run, print, write the file; 1 when an answer was wrong or something is left."""
    parser = argparse.ArgumentParser(prog="bench.handoff_faults", description=__doc__, allow_abbrev=False)
    parser.add_argument("--faults", type=int, default=500, help="how many (500)")
    parser.add_argument("--seed", type=int, default=1, help="of the faults (1)")
    parser.add_argument("--json", type=Path, default=RESULTS, help=f"where the result goes ({RESULTS.name})")
    given = parser.parse_args(argv)
    can_cut, machine, started_s = own_network(), Machine.here(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tiny-") as folder:
        model = write_tiny_model(Path(folder) / _MODEL)
        with local_mesh((*_MESH, "--model", f"{_MODEL}={model}"), _ENVIRONMENT) as mesh:
            rounds = Rounds(mesh, random.Random(given.seed), can_cut=can_cut)
            asyncio.run(_run(rounds, given.faults))
    result = summary(rounds.found, time.monotonic() - started_s)
    options = {"faults": given.faults, "seed": given.seed}
    given.json.parent.mkdir(exist_ok=True)
    written = {"machine": asdict(machine), "options": options, "cuts_possible": can_cut, **result}
    given.json.write_text(json.dumps(written, indent=1) + "\n")
    _show(result)
    return 1 if rounds.found.wrong or rounds.found.leaks else 0


async def _run(rounds: Rounds, faults: int) -> None:
    await rounds.learn()
    await rounds.run(faults)


def summary(found: Found, seconds: float) -> dict[str, Any]:
    """Counts, and pauses of complete streams in ms."""
    pauses = {share: percentile(found.pauses_s, part) for share, part in (("p50", 0.5), ("p99", 0.99))}
    return {
        "faults": found.faults.total(),
        "by_action": dict(sorted(found.faults.items())),
        "complete_and_equal": found.complete,
        "ended_by_client": found.ended_by_client,
        "refused_and_asked_again": found.refusals,
        "repeated_with_key": found.repeats,
        "wrong": found.wrong,
        "handoffs": dict(found.handoffs),
        "looks": found.looks,
        "leaks": found.leaks,
        "pause_ms": {share: None if value is None else round(value * 1000, 1) for share, value in pauses.items()},
        "seconds": round(seconds, 1),
    }


def _show(result: dict[str, Any]) -> None:
    table = Table(title="Random faults of handoffs and moves", show_header=False)
    for name, value in result.items():
        table.add_row(name.replace("_", " "), dumped(value))
    Console().print(table)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
