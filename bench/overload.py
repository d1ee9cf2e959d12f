"""`python -m bench.overload`: a mesh of simulated workers at up to twice its capacity, through the real edge.

Two workers compute 2,000 prompt tokens/s each and nothing is shared, so that the mesh is full at rates that the cores
it runs on, with the load, can bear. The capacity is what a closed loop gets. Then open loops: the load swept to twice
the capacity by two equal tenants; a quiet tenant beside one that sends its share, and then ten times that; interactive
beside batch work, each at the capacity; and, at once after that, a handful of requests that an idle mesh must take.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.kv_table import Machine
from bench.load_http import http_load
from bench.overload_load import (
    Answer,
    Objectives,
    Outcome,
    Send,
    Shape,
    Source,
    attempt,
    closed_loop,
    open_loop,
    outcome,
)
from services.cli.ports import free_ports
from services.common.bearer_keys import hash_key
from services.common.models import DEFAULT_MODEL

RESULTS = Path(__file__).parent / "results" / "overload.json"
OBJECTIVES = Objectives(ttft_s=2.0, tpot_s=0.2)
SHAPE = Shape(prompt_tokens=200, output_tokens=16)
LOADS = (0.5, 0.75, 1.0, 1.25, 2.0)
TENANTS = ("quiet", "noisy")
# Of the capacity: what the quiet tenant sends, and the noisy one's share.
QUIET_LOAD, NOISY_SHARE, NOISY_FACTOR = 0.3, 0.5, 10
_CLIENTS = 32
_AFTER = 6
_ENVIRONMENT = {
    "KVMESH_WORKER_SIM_PREFILL_TOKENS_PER_S": "2000",
    "KVMESH_WORKER_SIM_DECODE_STEP_S": "0.02",
    "KVMESH_WORKER_SIM_DECODE_SEQUENCE_S": "0.0005",
    "KVMESH_WORKER_NUM_BLOCKS": "2000",
    "KVMESH_WORKER_TARGET_STEP_S": "0.1",
    "KVMESH_GATEWAY_MAX_WAITING_REQUESTS": "64",
    "KVMESH_GATEWAY_MAX_TENANT_WAITING_REQUESTS": "48",
    "KVMESH_GATEWAY_MAX_WAIT_S": "20",
    "KVMESH_LOG_LEVEL": "WARNING",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One source of one load. load: of the capacity."""

    phase: str
    source: str
    load: float
    outcome: Outcome


@dataclass(slots=True)
class Bench:
    """A mesh under load, and the figures so far."""

    sends: dict[tuple[str, str], Send]
    capacity_rps: float
    rng: random.Random
    rows: list[Row]

    async def load(self, phase: str, loads: dict[tuple[str, str], float], duration_s: float) -> list[Outcome]:
        """Outcomes by source. loads: by tenant and class, of the capacity."""
        sources = [Source("/".join(key), self.sends[key], share * self.capacity_rps) for key, share in loads.items()]
        answers = await open_loop(sources, SHAPE, duration_s, self.rng)
        rows = [
            Row(phase, source.name, share, outcome(_of(answers, source.name), OBJECTIVES, duration_s))
            for source, share in zip(sources, loads.values(), strict=True)
        ]
        self.rows += rows
        return [row.outcome for row in rows]


@asynccontextmanager
async def overload_mesh() -> AsyncIterator[dict[tuple[str, str], Send]]:
    """A running mesh, and ways to send as each tenant in each class; interactive requests bring their objectives."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvm-"))
        keys = Path(folder) / "keys"
        keys.write_text("".join(f"{hash_key(tenant)} {tenant}\n" for tenant in TENANTS))
        port = next(free_ports())
        options = ("--engine", "sim", "--workers", "2", "--kvstores", "0", "--http-port", str(port))
        await asyncio.to_thread(_kvmesh, folder, {"KVMESH_GATEWAY_KEYS_FILE": str(keys)}, "up", "--detach", *options)
        stack.push_async_callback(asyncio.to_thread, _kvmesh, folder, {}, "down")
        sends: dict[tuple[str, str], Send] = {}
        for tenant in TENANTS:
            for kind, objectives in (("interactive", asdict(OBJECTIVES)), ("batch", {})):
                extra = {"kvmesh": {"priority": kind, **objectives}}
                load = http_load(f"http://127.0.0.1:{port}", DEFAULT_MODEL, tenant, extra=extra)
                sends[tenant, kind] = (await stack.enter_async_context(load)).send
        yield sends


async def measure(seconds: float, seed: int) -> tuple[Bench, dict[str, float]]:
    """All loads, each for `seconds`, those of the two tenants three times as long; and the claims' figures."""
    async with overload_mesh() as sends:
        rng = random.Random(seed)
        first = Source("closed", sends["quiet", "batch"], 1.0)
        await closed_loop(first, SHAPE, _CLIENTS, 3.0, rng)
        bench = Bench(sends, await closed_loop(first, SHAPE, _CLIENTS, seconds, rng), rng, [])
        interactive = [(tenant, "interactive") for tenant in TENANTS]
        goodput = {
            load: sum(
                one.goodput_rps for one in await bench.load("sweep", dict.fromkeys(interactive, load / 2), seconds)
            )
            for load in LOADS
        }
        quiet, noisy = interactive
        beside = {quiet: QUIET_LOAD, noisy: NOISY_SHARE}
        calm, _ = await bench.load("noisy at its share", beside, 3 * seconds)
        beside[noisy] *= NOISY_FACTOR
        loud, _ = await bench.load("noisy at ten times that", beside, 3 * seconds)
        mixed = {("quiet", "interactive"): 1.0, ("noisy", "batch"): 1.0}
        urgent, batch = await bench.load("classes", mixed, seconds)
        last = Source("after", sends["quiet", "interactive"], 1.0)
        after = [(await attempt(last, SHAPE, rng)).timing is not None for _ in range(_AFTER)]
    twice = [row.outcome for row in bench.rows if row.phase == "sweep" and row.load == LOADS[-1] / 2]
    served = sum(one.served for one in twice)
    return bench, {
        "kept_at_twice": sum(one.kept * one.served for one in twice) / max(1, served),
        "goodput_at_twice_of_peak": goodput[LOADS[-1]] / max(goodput.values()),
        "quiet_ttft_p99_ratio": loud.ttft_p99_s / calm.ttft_p99_s,
        "interactive_served": urgent.served / urgent.sent,
        "batch_served": batch.served / batch.sent,
        "refusals_without_retry_after": sum(row.outcome.without_retry_after for row in bench.rows),
        "accepted_after": sum(after) / _AFTER,
    }


def _of(answers: Sequence[Answer], source: str) -> list[Answer]:
    return [answer for answer in answers if answer.source == source]


def _kvmesh(state: str, environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-m", "services.cli", *arguments, "--state", state]
    done = subprocess.run(
        command,
        env={**os.environ, **_ENVIRONMENT, **environment},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
    )
    return done.stdout


def print_rows(bench: Bench) -> None:
    """The table."""
    table = Table(title=f"capacity {bench.capacity_rps:.1f} requests/s")
    for column in ("phase", "source", "load", "sent", "served", "goodput/s", "kept", "TTFT p50 s", "p99 s", "refused"):
        table.add_column(column)
    for row in bench.rows:
        one = row.outcome
        refused = ", ".join(f"{count} x {status}" for status, count in sorted(one.refused.items()))
        table.add_row(
            row.phase, row.source, f"{row.load:.2f}", str(one.sent), str(one.served), f"{one.goodput_rps:.2f}",
            f"{one.kept:.0%}", f"{one.ttft_p50_s:.3f}", f"{one.ttft_p99_s:.3f}", refused,
        )  # fmt: skip
    Console(width=150).print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="length of each load")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    machine = Machine.here()
    bench, figures = asyncio.run(measure(arguments.seconds, arguments.seed))
    print_rows(bench)
    for name, value in figures.items():
        print(f"{name:32} {value:.3f}")
    result: dict[str, Any] = {
        "machine": asdict(machine),
        "capacity_rps": bench.capacity_rps,
        "figures": figures,
        "rows": [asdict(row) for row in bench.rows],
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
