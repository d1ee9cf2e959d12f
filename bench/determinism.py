"""`python -m bench.determinism`: how often the same request gets other tokens when it is served in another way.

Sixteen prompts, greedy and seeded, through the engine's scheduler and the real model in this process. Each request's
tokens alone, with nothing cached, are the reference; then the same requests in batches, cut into small pieces, over
prefix hits, in a pool so small that they are preempted, and beside neighbours that are aborted. Two arithmetics, both
BF16 on CPU:

exact       what a CPU worker runs by default
not exact   the same decoder in plain torch as one would write it without care: `F.linear` on however many rows there
            are, and `scaled_dot_product_attention` on the gathered keys of each sequence

With `--url NAME=URL` servers are compared as well, by the texts of other prompts one by one and sixteen at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog
import torch
from rich.console import Console
from rich.table import Table

from bench.determinism_engine import Served, Tokens, exact_runner, plain_runner
from bench.determinism_http import different_texts
from bench.kv_table import Machine
from services.common.models import DEFAULT_MODEL
from services.worker.messages import Sampling
from services.worker.model.runner import CpuRunner

RESULTS = Path(__file__).parent / "results" / "determinism.json"
_REQUESTS = 16
_BATCHES = (2, 4, 8, 16)
_SMALL_POOL, _SMALL_BUDGET = 16, 33
_NEIGHBOURS = 8
_SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "seeded, T=0.8, top_p=0.95": Sampling(temperature=0.8, top_p=0.95, seed=7),
}
_RUNNERS = {"exact": exact_runner, "not exact": plain_runner}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. first_difference: mean output position of the first other token."""

    arithmetic: str
    sampling: str
    served: str
    requests: int
    different: int
    first_difference: float | None


def ways(runner: CpuRunner, output: int, sampling: Sampling) -> Iterator[tuple[str, Tokens]]:
    """Tokens by request of each way of serving. Raises RuntimeError when the small pool preempted nobody."""
    numbers = range(_REQUESTS)
    for size in _BATCHES:
        engine, tokens = Served(runner, output), Tokens()
        for first in range(0, _REQUESTS, size):
            tokens |= engine.run(numbers[first : first + size], sampling)
        yield f"{size} at once", tokens
    yield "16 at once, in pieces of 33 tokens", Served(runner, output, budget=_SMALL_BUDGET).run(numbers, sampling)
    engine = Served(runner, output)
    engine.run(numbers, sampling, cached=True)
    yield "16 at once, prefix hits", engine.run(numbers, sampling, cached=True)
    yield "16 at once, neighbours aborted", Served(runner, output).run(numbers, sampling, neighbours=_NEIGHBOURS)
    small = Served(runner, output, num_blocks=_SMALL_POOL)
    yield "preempted", small.run(numbers, sampling)
    if not small.core.scheduler.preemptions:
        raise RuntimeError("the small pool preempted nobody")


def compare(arithmetic: str, runner: CpuRunner, output: int) -> Iterator[Row]:
    """All ways of serving against each request alone."""
    for name, sampling in _SAMPLINGS.items():
        engine = Served(runner, output)
        alone = {number: engine.run([number], sampling)[number] for number in range(_REQUESTS)}
        for served, tokens in ways(runner, output, sampling):
            firsts = [first_difference(alone[number], tokens[number]) for number in alone]
            found = [first for first in firsts if first is not None]
            mean = round(statistics.mean(found), 1) if found else None
            yield Row(arithmetic, name, served, _REQUESTS, len(found), mean)


def first_difference(first: list[int], second: list[int]) -> int | None:
    """Position of the first token that differs; None when all are the same."""
    if first == second:
        return None
    pairs = zip(first, second, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


async def compare_servers(urls: list[str], output: int) -> list[Row]:
    """Each NAME=URL, one after the other."""
    rows = []
    for given in urls:
        name, _, url = given.partition("=")
        for label, sampling in _SAMPLINGS.items():
            fields = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}
            different = await different_texts(url.rstrip("/"), DEFAULT_MODEL, output, fields, _REQUESTS)
            rows.append(Row(f"server {name}", label, "16 at once", _REQUESTS, different, None))
    return rows


def show(rows: list[Row]) -> None:
    """A table."""
    table = Table("arithmetic", "sampling", "served", "requests", "different", "first at token")
    for row in rows:
        first = "" if row.first_difference is None else f"{row.first_difference:.1f}"
        counts = str(row.requests), f"{row.different} ({row.different / row.requests:.0%})"
        table.add_row(row.arithmetic, row.sampling, row.served, *counts, first)
    Console(width=130).print(table)


def main() -> int:
    """Exit status 1 when anything differs in exact mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=int, default=48, help="tokens of each request, at least 24")
    parser.add_argument("--url", action="append", default=[], metavar="NAME=URL", help="a server to compare as well")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the figures go")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    torch.set_grad_enabled(False)
    rows: list[Row] = []
    for arithmetic, make in _RUNNERS.items():
        with make() as runner:
            rows += compare(arithmetic, runner, arguments.output)
    rows += asyncio.run(compare_servers(arguments.url, arguments.output))
    show(rows)
    document = {"machine": asdict(Machine.here()), "output_tokens": arguments.output, "rows": [asdict(r) for r in rows]}
    arguments.json.parent.mkdir(exist_ok=True)
    arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if any(row.different for row in rows if row.arithmetic == "exact") else 0


if __name__ == "__main__":
    sys.exit(main())
