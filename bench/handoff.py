"""`python -m bench.handoff`: what long prompts do to running streams, with one kind of worker and with two.

Streams run on a mesh of two workers; every second a long prompt arrives that nobody has seen. Measured is the time
between two events of a stream, without the prompts and with them, in turns, since the streams' contexts grow: p99 and
the ratio of both, where both workers do all, and where one computes prompts and the other answers; medians of rounds in
which both take turns. `--engine sim`: the workers take the time of an accelerator, everything around them is real,
blocks are pulled; with `--slower` all of that time and of the load's, so that a busy machine does not show. `--model`:
one that the worker for prompts can keep up with on this machine; `--own-core` (bench/handoff_cores.py) where the
machine has next to none for anything but workers. Its other load is in the figures: say how quiet it was.
`--choice` prints, and with `--plot` draws, what a router decides by load, prompt length and link.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.handoff_choice import ACCELERATOR, CPU, Choice, choices, plot
from bench.handoff_cores import shared_out
from bench.handoff_streams import Prompts, Streams, offer
from bench.kv_node import cpu_seconds
from bench.kv_table import Machine
from bench.load import percentile
from bench.load_http import HttpLoad, http_load
from bench.local_mesh import LocalMesh, local_mesh
from services.common.models import DEFAULT_MODEL
from services.common.time_model import TimeModel

_LAYOUTS = {"both": ("--workers", "2"), "pools": ("--prefill-workers", "1", "--decode-workers", "1")}
_WARM_UP_S = 4.0
# Times without prompts, and as many with.
_TURNS = 2
# What an accelerator is assumed to take for a model of 8B parameters under load.
SIM_TIMES = TimeModel(20_000.0, decode_step_s=0.02, decode_sequence_s=0.0002)
_SIM_ENVIRONMENT = {
    "KVMESH_WORKER_SIM_PREFILL_TOKENS_PER_S": str(SIM_TIMES.prefill_tokens_per_s),
    "KVMESH_WORKER_SIM_DECODE_STEP_S": str(SIM_TIMES.decode_step_s),
    "KVMESH_WORKER_SIM_DECODE_SEQUENCE_S": str(SIM_TIMES.decode_sequence_s),
    "KVMESH_WORKER_SIM_TRANSFERS": "true",
}
_STREAMS = (0, 1, 2, 4, 8, 16, 32)
_LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# Speed of both workers, and of the link between them.
_CASES = {
    "CPU workers, link of 1 GB/s": (CPU, 1e9),
    "CPU workers, link of 10 MB/s": (CPU, 1e7),
    "accelerators, link of 10 GB/s": (ACCELERATOR, 1e10),
    "accelerators, link of 1 GB/s": (ACCELERATOR, 1e9),
}


@dataclass(frozen=True)
class Disturbance:
    """Time between two events of a stream, ms, alone and with prompts; and what became of these.

    late_ms: mean, of the steps of simulated workers. cores: that each process took while prompts came.
    """

    layout: str
    streams: int
    alone_p50_ms: float
    alone_p99_ms: float
    disturbed_p50_ms: float
    disturbed_p99_ms: float
    prompts: int
    left_out: int
    failed: int
    handoffs: float
    ttft_p50_s: float
    late_ms: float
    cores: dict[str, float]

    @property
    def ratio(self) -> float:
        """Of the p99s."""
        return self.disturbed_p99_ms / self.alone_p99_ms


def main() -> None:
    """Decide or measure, print, write."""
    parser = argparse.ArgumentParser(prog="bench.handoff", description=__doc__)
    parser.add_argument("--choice", action="store_true", help="what a router decides, without a mesh")
    parser.add_argument("--plot", type=Path, help="an SVG of these decisions")
    parser.add_argument("--engine", choices=("model", "sim"), default="model")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as `kvmesh up` takes it")
    parser.add_argument("--slower", type=float, default=1.0, help="of simulated workers and their load: times as slow")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--every-s", type=float, default=1.0, help="between two prompts")
    parser.add_argument("--layouts", nargs="+", choices=sorted(_LAYOUTS), default=sorted(_LAYOUTS))
    parser.add_argument("--own-core", action="store_true", help="for the second worker, in both layouts")
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    if options.choice:
        _show_choices(options.plot)
        return
    if options.slower != 1.0 and options.engine != "sim":
        parser.error("--slower needs --engine sim")
    before, machine = os.getloadavg()[0], Machine.here()
    turns = [(layout, turn) for turn in range(options.rounds) for layout in options.layouts]
    found = [asyncio.run(_measure(layout, turn, options)) for layout, turn in turns]
    _show(found, machine, before)
    if options.json is not None:
        rows = [{**asdict(one), "ratio": one.ratio} for one in found]
        given = {name: value for name, value in vars(options).items() if name not in ("choice", "plot", "json")}
        result = {"machine": asdict(machine), "load_before": before, "options": given, "rows": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


async def _measure(layout: str, turn: int, options: argparse.Namespace) -> Disturbance:
    is_sim = options.engine == "sim"
    flags = ("--kvstores", "0", "--model", options.model, *_LAYOUTS[layout])
    engine = ("--engine", "sim") if is_sim else ("--threads", "1")
    environment = _SIM_ENVIRONMENT | {"KVMESH_WORKER_SIM_SPEED": str(1.0 / options.slower)} if is_sim else None
    with (
        local_mesh(*flags, *engine, environment=environment) as mesh,
        shared_out(mesh) if options.own_core else nullcontext(),
    ):
        return await _disturbed(mesh, layout, turn, options)


async def _disturbed(mesh: LocalMesh, layout: str, turn: int, options: argparse.Namespace) -> Disturbance:
    model = options.model.partition("=")[0]
    streams, found = Streams(mesh.port, model, options.streams), _Found()
    try:
        await asyncio.sleep(_WARM_UP_S * options.slower)
        async with http_load(f"http://127.0.0.1:{mesh.port}", model) as load:
            await _take_turns(mesh, streams, load, random.Random(turn), options, found)
    finally:
        await streams.close()
    alone, disturbed, prompts = _ms(found.alone_s), _ms(found.disturbed_s), found.prompts
    steps = mesh.total("worker", "kvmesh_sim_late_seconds_count")
    return Disturbance(
        layout=layout,
        streams=options.streams,
        alone_p50_ms=percentile(alone, 0.5),
        alone_p99_ms=percentile(alone, 0.99),
        disturbed_p50_ms=percentile(disturbed, 0.5),
        disturbed_p99_ms=percentile(disturbed, 0.99),
        prompts=len(prompts.ttfts_s),
        left_out=prompts.left_out,
        failed=prompts.failed,
        handoffs=mesh.total("gateway", "kvmesh_gateway_handoffs_total", 'outcome="completed"'),
        ttft_p50_s=percentile(sorted(prompts.ttfts_s), 0.5) if prompts.ttfts_s else float("nan"),
        late_ms=1e3 * mesh.total("worker", "kvmesh_sim_late_seconds_sum") / max(1.0, steps),
        cores={name: round(seconds / found.lasted_s, 3) for name, seconds in found.cpu_s.items()},
    )


@dataclass(slots=True)
class _Found:
    """Times between events alone and with prompts, what became of these, and what processes used in how long then."""

    alone_s: list[float] = field(default_factory=list)
    disturbed_s: list[float] = field(default_factory=list)
    prompts: Prompts = field(default_factory=Prompts)
    cpu_s: dict[str, float] = field(default_factory=dict)
    lasted_s: float = 0.0


async def _take_turns(
    mesh: LocalMesh, streams: Streams, load: HttpLoad, rng: random.Random, options: argparse.Namespace, found: _Found
) -> None:
    """Some seconds without prompts, as many with, and again."""
    seconds = options.seconds * options.slower / _TURNS
    every_s = options.every_s * options.slower
    for _ in range(_TURNS):
        streams.reset()
        await asyncio.sleep(seconds)
        found.alone_s += streams.gaps_s
        streams.reset()
        before, began_s = _cpu_s(mesh), time.monotonic()
        found.prompts.add(await offer(load, rng, num_tokens=options.prompt_tokens, every_s=every_s, seconds=seconds))
        found.disturbed_s += streams.gaps_s
        found.lasted_s += time.monotonic() - began_s
        for name, used_s in _cpu_s(mesh).items():
            found.cpu_s[name] = found.cpu_s.get(name, 0.0) + used_s - before[name]


def _ms(gaps_s: Sequence[float]) -> list[float]:
    return sorted(1e3 * gap for gap in gaps_s)


def _cpu_s(mesh: LocalMesh) -> dict[str, float]:
    return {name: cpu_seconds(pid) for name, pid in mesh.pids().items()}


def _show(found: Sequence[Disturbance], machine: Machine, load_before: float) -> None:
    """Medians of the rounds."""
    table = Table(title=f"Time between two events of a stream. {machine}; load average before: {load_before:.1f}")
    columns = "alone p50 / p99 ms", "with prompts", "p99 ratio", "prompts", "left out, failed", "handoffs", "TTFT p50 s"
    for column in ("workers", "streams", *columns):
        table.add_column(column, justify="right")
    for layout in dict.fromkeys(one.layout for one in found):
        rows = [one for one in found if one.layout == layout]

        def median(name: str, rows: Sequence[Disturbance] = rows) -> float:
            return float(statistics.median(getattr(one, name) for one in rows))

        table.add_row(
            layout,
            f"{median('streams'):.0f}",
            f"{median('alone_p50_ms'):.1f} / {median('alone_p99_ms'):.1f}",
            f"{median('disturbed_p50_ms'):.1f} / {median('disturbed_p99_ms'):.1f}",
            f"{median('ratio'):.2f}",
            f"{median('prompts'):.0f}",
            f"{median('left_out'):.0f}, {median('failed'):.0f}",
            f"{median('handoffs'):.0f}",
            f"{median('ttft_p50_s'):.2f}",
        )
    Console(width=140).print(table)


def _show_choices(svg: Path | None) -> None:
    panels: dict[str, list[Choice]] = {
        title: choices(speed, _STREAMS, _LENGTHS, link_bytes_per_s=rate) for title, (speed, rate) in _CASES.items()
    }
    for title, found in panels.items():
        table = Table(title=f"{title}: 2 where prompt and output are at two workers")
        table.add_column("streams", justify="right")
        for length in _LENGTHS:
            table.add_column(str(length), justify="right")
        for count in _STREAMS:
            table.add_row(str(count), *("2" if one.is_pair else "1" for one in found if one.streams == count))
        Console().print(table)
    if svg is not None:
        svg.write_text(plot({title: list(found) for title, found in panels.items()}))


if __name__ == "__main__":
    main()
