"""`python -m bench.router [--dynamo VENV]`: how fast the router finds blocks, takes announcements in, and decides.

Of the location index at each number of locations: p50 and p99 of a lookup (who holds how much of a prompt) by length,
announcements applied, and memory; of the whole router: p50 and p99 of a decision through gRPC. With `--dynamo`, an
environment in which the PyPI package `ai-dynamo-runtime` is installed, the same workload goes through NVIDIA Dynamo's
RadixTree, right after. What is looked up says `router_workload`.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.kv_table import Machine
from bench.router_index import IndexFigures, measure, measure_dynamo
from bench.router_route import RouteFigures
from bench.router_route import measure as measure_route

RESULTS = Path(__file__).parent / "results" / "router.json"
LENGTHS = [8, 64, 512, 4096]
# Named as the tables name them.
OURS, DYNAMO = "kvmesh", "dynamo"


def run_index(
    locations: list[int], num_blocks: int, samples: int, dynamo: Path | None, *, cpu_time: bool
) -> dict[int, dict[str, IndexFigures]]:
    """Figures by number of locations and index, each measured in a process of its own."""
    found: dict[int, dict[str, IndexFigures]] = {}
    for count in locations:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            ours = pool.submit(measure, count, num_blocks, samples, LENGTHS, cpu_time=cpu_time)
            found[count] = {OURS: ours.result()}
        if dynamo is not None:
            found[count][DYNAMO] = measure_dynamo(dynamo, count, num_blocks, samples, LENGTHS, cpu_time=cpu_time)
    return found


def show_index(console: Console, found: dict[int, dict[str, IndexFigures]]) -> None:
    """Print lookups, then what announcements cost."""
    names = list(next(iter(found.values())))
    finds = Table(*("locations", "prompt", "blocks", *(f"{name} {q} µs" for name in names for q in ("p50", "p99"))))
    feeds = Table("locations", "index", "entries", "blocks/s in", "announcements/s", "bytes/block")
    for count, by_name in found.items():
        for kinds in zip(*(figures.finds for figures in by_name.values()), strict=True):
            figures_us = (f"{value:,.0f}" for one in kinds for value in (one.p50_us, one.p99_us))
            finds.add_row(f"{count:,}", kinds[0].prompt, f"{kinds[0].num_blocks:,}", *figures_us)
        for name, one in by_name.items():
            rates = (one.entries, one.blocks_per_s, one.announcements_per_s, one.bytes_per_block)
            feeds.add_row(f"{count:,}", name, *(f"{value:,.0f}" for value in rates))
    console.print(finds)
    console.print(feeds)


def show_route(console: Console, found: list[RouteFigures]) -> None:
    """Print decisions through gRPC."""
    table = Table("workers", "asks/s", "prompt blocks", "granted", "p50 ms", "p99 ms", "router CPU")
    for one in found:
        table.add_row(
            *(f"{one.num_workers:,}", f"{one.asks_per_s:.0f}", f"{one.num_blocks}", f"{one.granted:,}"),
            *(f"{one.p50_ms:.2f}", f"{one.p99_ms:.2f}", f"{one.cpu_share:.0%}"),
        )
    console.print(table)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--locations", type=int, nargs="*", default=[16, 128, 1000, 7000])
    parser.add_argument("--blocks", type=int, default=1_000_000, help="distinct blocks in the index")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--workers", type=int, nargs="*", default=[16, 128, 1000], help="for decisions")
    parser.add_argument("--asks", type=int, default=5000, help="decisions measured, at 500 a second")
    parser.add_argument("--dynamo", type=Path, help="environment with ai-dynamo-runtime")
    parser.add_argument("--cpu-time", action="store_true", help="lookups by CPU time, where others keep the CPUs busy")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    machine = Machine.here()
    index = run_index(
        arguments.locations, arguments.blocks, arguments.samples, arguments.dynamo, cpu_time=arguments.cpu_time
    )
    route = [measure_route(count, arguments.blocks, 512, 500.0, arguments.asks) for count in arguments.workers]
    console = Console(width=150)
    if index:
        show_index(console, index)
    show_route(console, route)
    found = {
        "machine": asdict(machine),
        "blocks": arguments.blocks,
        "lookups_by": "cpu" if arguments.cpu_time else "wall",
        "index": [
            {"locations": count, "index": name} | asdict(one)
            for count, by_name in index.items()
            for name, one in by_name.items()
        ],
        "route": [asdict(one) for one in route],
    }
    arguments.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
