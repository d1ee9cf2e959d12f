"""`python -m bench.drain`: what clients notice of a worker that is told to end while it answers them.

CPU workers with one thread each. Streams of about a thousand tokens of context all run on one worker, which gets
SIGTERM. The same requests are answered undisturbed before, to compare texts. A stream's gap is the longest time between
two of its events from the signal until the worker has ended; beside it stand the times between two events before it,
and the longest one in the seconds after, in which the worker's successor starts.
Every round is a mesh of its own. Afterwards nothing may be running, referenced, leased or waiting anywhere.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.drain_moves import moves_in, moves_table
from bench.drain_streams import Stream, body_of, follow, wait_for_events
from bench.kv_table import Machine
from bench.load import percentile
from bench.local_mesh import LocalMesh, local_mesh
from services.cli.state import StateDir

RESULTS = Path(__file__).parent / "results" / "drain.json"
_VICTIM = "worker-0"
# Events of every stream before the signal.
_EVENTS_BEFORE = 20
_END_TIMEOUT_S = 60.0
# From the worker's end on: time in which its successor starts.
_AFTER_S = 8.0
# What must be back at zero: of the workers and their movers, of kvstore nodes and gateways.
_STATEFUL = ("worker", "kvstore", "gateway")
_IDLE_GAUGES = (
    "kvmesh_worker_running_requests",
    "kvmesh_worker_waiting_requests",
    "kvmesh_worker_referenced_blocks",
    "kvmesh_mover_running_pulls",
    "kvmesh_mover_open_leases",
    "kvmesh_kvstore_open_leases",
    "kvmesh_gateway_waiting_requests",
)


@dataclass(frozen=True, slots=True)
class Round:
    """One drain. Times in ms: a gap a stream, and the times between events of all streams before the signal.

    ended_s: from the signal to the worker's end. during: times between events of all streams until then, the longest of
    each left out. after_gaps_ms: those of the seconds after. moves: what the gateway logged of each. left: gauges that
    are not back at zero.
    """

    exit: str
    ended_s: float
    streams: int
    errors: list[str]
    equal_texts: int
    moved: float
    rescues: float
    gaps_ms: list[float]
    after_gaps_ms: list[float]
    before_p50_ms: float
    before_p99_ms: float
    during_p50_ms: float
    during_p99_ms: float
    gateway_gap_ms: float
    moves: list[dict[str, Any]]
    left: dict[str, float]

    @property
    def is_clean(self) -> bool:
        """Whether nobody lost anything."""
        whole = not self.errors and self.equal_texts == self.streams and not self.rescues
        return whole and self.exit == "status 0" and not self.left


def main(argv: Sequence[str]) -> int:
    """Run the rounds, write the file after each, print; 1 when anything was lost or is left."""
    parser = argparse.ArgumentParser(prog="bench.drain", description=__doc__, allow_abbrev=False)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--output-tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULTS, help=f"where the result goes ({RESULTS.name})")
    given = parser.parse_args(argv)
    machine, load_before = Machine.here(), os.getloadavg()[0]
    options = {name: value for name, value in vars(given).items() if name != "json"}
    result = {"machine": asdict(machine), "load_before": load_before, "options": options}
    rounds: list[Round] = []
    for number in range(given.rounds):
        rounds.append(_round(number, given))
        told = {**result, **_percentiles(rounds), "rounds": [asdict(one) for one in rounds]}
        given.json.write_text(json.dumps(told, indent=1) + "\n")
    found = _percentiles(rounds)
    _show(rounds, f"Gap p50 {found['gap_p50_ms']:.0f} ms, p99 {found['gap_p99_ms']:.0f} ms. {machine}")
    return 0 if all(one.is_clean for one in rounds) else 1


def _percentiles(rounds: Sequence[Round]) -> dict[str, float]:
    gaps_ms = sorted(gap for one in rounds for gap in one.gaps_ms)
    return {"gap_p50_ms": percentile(gaps_ms, 0.5), "gap_p99_ms": percentile(gaps_ms, 0.99)}


def _round(number: int, given: argparse.Namespace) -> Round:
    first = number * given.streams
    bodies = [body_of(first + one, given.prompt_tokens, given.output_tokens) for one in range(given.streams)]
    with local_mesh("--workers", str(given.workers), "--threads", "1") as mesh:
        return asyncio.run(_drain(mesh, bodies))


async def _drain(mesh: LocalMesh, bodies: Sequence[dict[str, Any]]) -> Round:
    others = [one["name"] for one in mesh.processes if one["kind"] == "worker" and one["name"] != _VICTIM]
    for name in others:
        mesh.kvmesh("ctl", "drain", name)
    expected, streams = ([Stream() for _ in bodies] for _ in range(2))
    await _follow_all(mesh, bodies, expected)
    following = asyncio.create_task(_follow_all(mesh, bodies, streams))
    try:
        await wait_for_events(streams, _EVENTS_BEFORE)
        await asyncio.gather(*(asyncio.to_thread(mesh.kvmesh, "ctl", "undrain", name) for name in others))
        if any(one.is_done for one in streams):
            raise RuntimeError("a stream ended before the signal: it takes more output tokens")
        signalled_s = time.monotonic()
        os.kill(next(one["pid"] for one in mesh.processes if one["name"] == _VICTIM), signal.SIGTERM)
        end = await _eventually(lambda: _victim_end(mesh))
        ended_s = time.monotonic()
        await following
    finally:
        following.cancel()
    await _eventually(lambda: "" if _left(mesh) else "idle")
    before_ms = sorted(1e3 * gap for one in streams for gap in one.gaps_s(0.0, signalled_s)[1:-1])
    gaps_ms = [sorted(1e3 * gap for gap in one.gaps_s(signalled_s, ended_s)) for one in streams]
    after_ms = [one.gaps_s(ended_s, ended_s + _AFTER_S) for one in streams]
    during_ms = sorted(gap for gaps in gaps_ms for gap in gaps[:-1]) or [0.0]
    moves = mesh.total("gateway", "kvmesh_gateway_move_gap_seconds_count")
    gateways = [one["name"] for one in mesh.processes if one["kind"] == "gateway"]
    return Round(
        exit=end or "still there",
        ended_s=ended_s - signalled_s,
        streams=len(streams),
        errors=[one.error for one in streams if one.error],
        equal_texts=sum(one.text == other.text for one, other in zip(streams, expected, strict=True)),
        moved=mesh.total("gateway", "kvmesh_gateway_moves_total", 'outcome="moved"'),
        rescues=mesh.total("gateway", "kvmesh_gateway_rescues_total"),
        gaps_ms=[gaps[-1] if gaps else 0.0 for gaps in gaps_ms],
        after_gaps_ms=[1e3 * max(gaps, default=0.0) for gaps in after_ms],
        before_p50_ms=percentile(before_ms, 0.5),
        before_p99_ms=percentile(before_ms, 0.99),
        during_p50_ms=percentile(during_ms, 0.5),
        during_p99_ms=percentile(during_ms, 0.99),
        gateway_gap_ms=1e3 * mesh.total("gateway", "kvmesh_gateway_move_gap_seconds_sum") / max(1.0, moves),
        moves=moves_in(StateDir(mesh.folder).log(name) for name in gateways),
        left=_left(mesh),
    )


async def _follow_all(mesh: LocalMesh, bodies: Sequence[dict[str, Any]], streams: Sequence[Stream]) -> None:
    await asyncio.gather(*(follow(mesh.port, body, one) for body, one in zip(bodies, streams, strict=True)))


async def _eventually(read: Callable[[], str]) -> str:
    """The first answer of `read` that is not empty; empty when there is none in time."""
    until_s = time.monotonic() + _END_TIMEOUT_S
    while not (found := await asyncio.to_thread(read)) and time.monotonic() < until_s:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return found


def _left(mesh: LocalMesh) -> dict[str, float]:
    """Gauges that are not at zero, by name."""
    found = {name: sum(mesh.total(kind, name) for kind in _STATEFUL) for name in _IDLE_GAUGES}
    return {name: value for name, value in found.items() if value}


def _victim_end(mesh: LocalMesh) -> str:
    """How the supervisor says that the drained worker has ended; empty while it has not."""
    found = re.findall(rf"{_VICTIM} ended \((.*?)\)", StateDir(mesh.folder).log("supervisor").read_text())
    return found[-1] if found else ""


def _sorted_ms(gaps_ms: Sequence[float]) -> str:
    return " ".join(f"{gap:.0f}" for gap in sorted(gaps_ms))


def _show(rounds: Sequence[Round], title: str) -> None:
    table = Table(title=title)
    gaps = "gaps ms", "after ms", "before / during p50 ms"
    for column in ("exit", "ended s", "errors", "equal", "moved", "rescues", *gaps, "left"):
        table.add_column(column, justify="right")
    for one in rounds:
        table.add_row(
            one.exit,
            f"{one.ended_s:.1f}",
            str(len(one.errors)),
            f"{one.equal_texts}/{one.streams}",
            f"{one.moved:.0f}",
            f"{one.rescues:.0f}",
            _sorted_ms(one.gaps_ms),
            _sorted_ms(one.after_gaps_ms),
            f"{one.before_p50_ms:.0f} / {one.during_p50_ms:.0f}",
            json.dumps(one.left) if one.left else "nothing",
        )
    console = Console(width=170)
    console.print(table)
    for one in rounds:
        console.print(moves_table(one.moves))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
