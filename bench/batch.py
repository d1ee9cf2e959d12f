"""`python -m bench.batch`: a batch of 2,000 lines on a mesh that also serves interactive streams.

Two simulated workers (the times are below) behind two gateways, two routers, a kvstore node, Valkey and Envoy. The same
open loop of interactive streams runs four times: alone, and beside the batch, each while nothing happens and while one
process of every kind is killed. Then the batch goes on to its end, and each line must have been answered exactly once.
Stated is the streams' time to the first token with the batch over that without, for either. No two streams share a
prompt. The load runs on the same cores as the mesh.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.batch_client import OVER, BatchClient, Verdict
from bench.fault_mesh import LocalMesh, local_mesh, scrape, total
from bench.kv_table import Machine
from bench.load_http import http_load
from bench.overload_load import Objectives, Outcome, Shape, Source, open_loop, outcome
from services.common.models import DEFAULT_MODEL

RESULTS = Path(__file__).parent / "results" / "batch.json"
SHAPE = Shape(prompt_tokens=200, output_tokens=24)
LINE = Shape(prompt_tokens=48, output_tokens=16)
OBJECTIVES = Objectives(ttft_s=2.0, tpot_s=0.2)
# Each of these is killed, this far apart.
VICTIMS = ("valkey", "router", "kvstore", "worker", "gateway")
PAUSE_S = 2.0
_OPTIONS = ("--engine", "sim", "--workers", "2", "--gateways", "2", "--routers", "2", "--kvstores", "1")
TIMES = {
    "KVMESH_WORKER_SIM_PREFILL_TOKENS_PER_S": "4000",
    "KVMESH_WORKER_SIM_DECODE_STEP_S": "0.02",
    "KVMESH_WORKER_SIM_DECODE_SEQUENCE_S": "0.0005",
    "KVMESH_WORKER_TARGET_STEP_S": "0.1",
    "KVMESH_WORKER_NUM_BLOCKS": "2000",
}
_ENVIRONMENT = {**TIMES, "KVMESH_LOG_LEVEL": "WARNING"}
_END_S, _READY_S, _POLL_S = 600.0, 120.0, 0.5


@dataclass(frozen=True, slots=True)
class Round:
    """The streams of one round. lines_per_s: of the batch meanwhile."""

    name: str
    outcome: Outcome
    lines_per_s: float


@dataclass(frozen=True, slots=True)
class Ratios:
    """Of the streams' 99th percentile of the time to the first token, beside the batch over alone."""

    calm: float
    killed: float


def _ratio(alone: Round, beside: Round) -> float:
    return beside.outcome.ttft_p99_s / alone.outcome.ttft_p99_s


async def measure(given: argparse.Namespace) -> tuple[list[Round], Verdict, list[str]]:
    """The rounds, alone and beside the batch, then both with kills; what came of the lines, and who was killed."""
    with local_mesh(_OPTIONS, _ENVIRONMENT) as mesh:
        await mesh.wait_ready(_READY_S)
        client = BatchClient(mesh.port)
        try:
            return await _measure(mesh, client, given)
        finally:
            client.close()


async def _measure(
    mesh: LocalMesh, client: BatchClient, given: argparse.Namespace
) -> tuple[list[Round], Verdict, list[str]]:
    rng = random.Random(given.seed)
    await _streams(mesh, "warm-up", given, rng)
    rounds = [await _streams(mesh, "alone", given, rng)]
    broken, killed = await _with_kills(mesh, _streams(mesh, "alone, with kills", given, rng))
    await mesh.wait_ready(_READY_S)
    batch_id = await asyncio.to_thread(client.begin, given.lines, LINE.prompt_tokens, LINE.output_tokens, rng)
    async with asyncio.timeout(_END_S):
        while (await asyncio.to_thread(client.progress, batch_id))[1] < given.lines // 50:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
    rounds.append(await _streams(mesh, "beside the batch", given, rng, client, batch_id))
    broken_too, killed_too = await _with_kills(
        mesh, _streams(mesh, "beside it, with kills", given, rng, client, batch_id)
    )
    rounds += [broken, broken_too]
    async with asyncio.timeout(_END_S):
        while (await asyncio.to_thread(client.progress, batch_id))[0] not in OVER:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
    verdict = await asyncio.to_thread(client.verdict, batch_id, given.lines, LINE.output_tokens)
    return rounds, verdict, killed + killed_too


async def _streams(
    mesh: LocalMesh,
    name: str,
    given: argparse.Namespace,
    rng: random.Random,
    client: BatchClient | None = None,
    batch_id: str = "",
) -> Round:
    extra = {"kvmesh": {"priority": "interactive"}}
    async with http_load(f"http://127.0.0.1:{mesh.port}", DEFAULT_MODEL, "none", extra=extra) as load:
        source = Source("interactive", load.send, given.rate)
        before, start_s = await _answered(client, batch_id), time.monotonic()
        answers = await open_loop([source], SHAPE, given.seconds, rng)
        lines = await _answered(client, batch_id) - before
    return Round(name, outcome(answers, OBJECTIVES, given.seconds), lines / (time.monotonic() - start_s))


async def _answered(client: BatchClient | None, batch_id: str) -> int:
    return (await asyncio.to_thread(client.progress, batch_id))[1] if client is not None else 0


async def _with_kills(mesh: LocalMesh, streams: Coroutine[Any, Any, Round]) -> tuple[Round, list[str]]:
    """A round, and who was killed meanwhile."""
    async with asyncio.TaskGroup() as group:
        killing, round_ = group.create_task(_kill_all(mesh)), group.create_task(streams)
    return round_.result(), killing.result()


async def _kill_all(mesh: LocalMesh) -> list[str]:
    """One process of each kind, one after another; of the gateways, the one that runs the batch."""
    killed = []
    for kind in VICTIMS:
        await asyncio.sleep(PAUSE_S)
        found = await mesh.ready(kind)
        victim = next((one for one in found if _runs_a_batch(one)), found[0])
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim["pid"], signal.SIGKILL)
            killed.append(victim["name"])
    return killed


def _runs_a_batch(process: Mapping[str, Any]) -> bool:
    if process["kind"] != "gateway":
        return False
    return total(scrape(process["metrics"]), "kvmesh_gateway_running_batches") > 0


def main(argv: Sequence[str]) -> int:
    """Measure, print, write; 1 when a line was not answered exactly once."""
    parser = argparse.ArgumentParser(prog="bench.batch", description=__doc__, allow_abbrev=False)
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=30.0, help="length of each round")
    parser.add_argument("--rate", type=float, default=10.0, help="interactive streams per second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=RESULTS, help=f"where the result goes ({RESULTS.name})")
    given = parser.parse_args(argv)
    machine = Machine.here()
    rounds, verdict, killed = asyncio.run(measure(given))
    ratios = Ratios(_ratio(*rounds[:2]), _ratio(*rounds[2:]))
    result = {
        "machine": asdict(machine),
        "options": {name: value for name, value in vars(given).items() if name != "json"},
        "workers": {"engine": "sim", **TIMES},
        "shapes": {"stream": asdict(SHAPE), "line": asdict(LINE)},
        "rounds": [asdict(one) for one in rounds],
        "ttft_p99_ratio": asdict(ratios),
        "killed": killed,
        "lines": asdict(verdict),
    }
    given.json.write_text(json.dumps(result, indent=1) + "\n")
    _show(rounds, verdict, ratios, machine)
    return 0 if verdict.is_right else 1


def _show(rounds: Sequence[Round], verdict: Verdict, ratios: Ratios, machine: Machine) -> None:
    title = f"TTFT p99 beside the batch is {ratios.calm:.2f} of that without, {ratios.killed:.2f} with kills in both"
    table = Table(title=f"{title}. {verdict}. {machine}")
    for column in ("round", "streams", "served", "TTFT p50 ms", "p99 ms", "TPOT p50 ms", "lines/s"):
        table.add_column(column, justify="right")
    for one in rounds:
        found = one.outcome
        times = (found.ttft_p50_s, found.ttft_p99_s, found.tpot_p50_s)
        table.add_row(
            one.name, str(found.sent), str(found.served), *(f"{1e3 * s:.0f}" for s in times), f"{one.lines_per_s:.1f}"
        )
    Console(width=150).print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
