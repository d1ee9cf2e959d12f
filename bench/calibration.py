"""`python -m bench.calibration`: how right a router's predictions are on a real mesh under load.

A mesh on this machine serves Poisson arrivals at a few rates in turn: prompts of 32 to 1,500 tokens, two thirds of
which share a prefix with others, answers of 4 to 48 tokens, at most 12 at once. The router says of each request what
time to the first token it predicted and what its gateway measured; the absolute relative error is printed by rate, by
what had to wait, and for all, beside that of the predictions without corrections. The machine's load by others is in
the figures: say how quiet it was.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.engine_servers import mesh
from bench.kv_table import Machine
from bench.load import FIRST_TOKEN_ID, LAST_TOKEN_ID, percentile
from bench.load_http import HttpLoad, RequestFailedError, http_load
from services.common.models import DEFAULT_MODEL

_PORT = 18_480
_MOST_AT_ONCE = 12
_PREFIX_TOKENS = (256, 512, 768, 1024)
_LENGTHS = (32, 1500)
_OUTPUTS = (4, 48)
_SETTLE_S = 3.0
# What a router logs at the end of each attempt.
_CLOSED = "attempt closed"


@dataclass(frozen=True)
class Sample:
    """One request: seconds, 0 where there was no such time."""

    predicted_ttft_s: float
    uncorrected_ttft_s: float
    actual_ttft_s: float
    predicted_tpot_s: float
    actual_tpot_s: float
    queue_s: float


@dataclass(frozen=True)
class Errors:
    """Absolute relative errors of some requests; bias: the median of predicted over actual."""

    name: str
    requests: int
    ttft_p50: float
    ttft_p90: float
    ttft_bias: float
    uncorrected_p50: float
    tpot_p50: float


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="bench.calibration", description=__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="requests/s, one after another")
    parser.add_argument("--seconds", type=float, default=45.0, help="of each rate")
    parser.add_argument("--warm-up", type=int, default=20, help="first requests, which are not counted")
    parser.add_argument("--flags", default="", help="of `kvmesh up`")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path("bench/results/calibration.json"))
    options = parser.parse_args()
    os.environ["KVMESH_ROUTER_LOG_LEVEL"] = "DEBUG"
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="calibration-") as folder:
        phases = asyncio.run(_measure(Path(folder), options))
    rows = [errors_of(f"{rate:g} requests/s", samples) for rate, samples in zip(options.rates, phases, strict=True)]
    everything = [sample for samples in phases for sample in samples]
    rows += [
        errors_of("first in line", [sample for sample in everything if sample.queue_s < 0.05]),
        errors_of("behind others", [sample for sample in everything if sample.queue_s >= 0.05]),
        errors_of("all", everything),
    ]
    machine = Machine.here()
    _show(rows, machine, before)
    result = {"machine": asdict(machine), "load_before": before, "rows": [asdict(row) for row in rows]}
    options.json.write_text(json.dumps(result, indent=1) + "\n")


async def _measure(folder: Path, options: argparse.Namespace) -> list[list[Sample]]:
    rng = random.Random(options.seed)
    source = prompts(rng)
    with mesh(folder, _PORT, options.flags.split()) as server:
        logs = folder / server.name
        phases: list[list[Sample]] = []
        async with http_load(server.url, DEFAULT_MODEL) as load:
            await load.send([FIRST_TOKEN_ID] * 32, 4)
            seen = len(_samples(logs))
            for rate in options.rates:
                await _offer(load, source, rate, options.seconds, rng)
                await asyncio.sleep(_SETTLE_S)
                samples = _samples(logs)
                phases.append(samples[max(seen, options.warm_up) :])
                seen = len(samples)
    return phases


def prompts(rng: random.Random) -> Iterator[list[int]]:
    """Token ids; two in three begin as others do, which have been there before or not."""
    prefixes = [_tokens(length, rng) for length in _PREFIX_TOKENS for _ in range(2)]
    while True:
        if rng.random() < 2 / 3:
            prefix = rng.choice(prefixes)
            yield prefix + _tokens(rng.randint(8, _LENGTHS[1] - len(prefix)), rng)
        else:
            yield _tokens(rng.randint(*_LENGTHS), rng)


async def _offer(load: HttpLoad, source: Iterator[list[int]], rate: float, seconds: float, rng: random.Random) -> None:
    """Poisson arrivals; one that finds `_MOST_AT_ONCE` in flight is left out."""
    places = asyncio.Semaphore(_MOST_AT_ONCE)
    end_s = time.monotonic() + seconds
    left_out = 0

    async def send(prompt: list[int], output_tokens: int) -> None:
        async with places:
            try:
                await load.send(prompt, output_tokens)
            except RequestFailedError as error:
                print(f"not served: {error}")

    async with asyncio.TaskGroup() as group:
        while time.monotonic() < end_s:
            await asyncio.sleep(rng.expovariate(rate))
            if places.locked():
                left_out += 1
                continue
            group.create_task(send(next(source), rng.randint(*_OUTPUTS)))
    if left_out:
        print(f"{rate:g} requests/s: {left_out} left out at {_MOST_AT_ONCE} in flight")


def _samples(logs: Path) -> list[Sample]:
    """What routers logged of requests that ended well, in order."""
    lines = [line for path in sorted(logs.rglob("router*.log")) for line in path.read_text().splitlines()]
    return [_sample(json.loads(line)) for line in lines if f'"{_CLOSED}"' in line and '"ok"' in line]


def _sample(entry: dict[str, float]) -> Sample:
    names = ("predicted_ttft_s", "uncorrected_ttft_s", "actual_ttft_s", "predicted_tpot_s", "actual_tpot_s", "queue_s")
    return Sample(*(float(entry[name]) for name in names))


def errors_of(name: str, samples: Sequence[Sample]) -> Errors:
    """Of at least one request with a first token; nan where there is none."""
    served = [sample for sample in samples if sample.actual_ttft_s > 0]
    if not served:
        return Errors(name, 0, *(float("nan"),) * 5)
    ttft = sorted(abs(one.predicted_ttft_s - one.actual_ttft_s) / one.actual_ttft_s for one in served)
    raw = [abs(one.uncorrected_ttft_s - one.actual_ttft_s) / one.actual_ttft_s for one in served]
    tpot = [abs(one.predicted_tpot_s - one.actual_tpot_s) / one.actual_tpot_s for one in served if one.actual_tpot_s]
    return Errors(
        name,
        len(served),
        ttft_p50=statistics.median(ttft),
        ttft_p90=percentile(ttft, 0.9),
        ttft_bias=statistics.median(one.predicted_ttft_s / one.actual_ttft_s for one in served),
        uncorrected_p50=statistics.median(raw),
        tpot_p50=statistics.median(tpot) if tpot else float("nan"),
    )


def _tokens(count: int, rng: random.Random) -> list[int]:
    return [rng.randrange(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(count)]


def _show(rows: Sequence[Errors], machine: Machine, load_before: float) -> None:
    title = f"Predicted against measured, absolute relative error. {machine}; load average before: {load_before:.1f}"
    table = Table(title=title)
    columns = ("", "requests", "TTFT p50", "TTFT p90", "predicted / actual", "uncorrected p50", "TPOT p50")
    for column in columns:
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        figures = (f"{row.ttft_p50:.1%}", f"{row.ttft_p90:.1%}", f"{row.ttft_bias:.2f}")
        table.add_row(row.name, str(row.requests), *figures, f"{row.uncorrected_p50:.1%}", f"{row.tpot_p50:.1%}")
    Console().print(table)


if __name__ == "__main__":
    main()
