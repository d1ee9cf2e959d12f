"""`python -m bench.engine_threads`: how many compute threads a worker should have, measured.

Meshes that differ in nothing else stand at once and are asked in turn, cell by cell and round by round, over HTTP, with
client, gateway and Envoy on the same cores. Figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.engine_servers import Server, mesh
from bench.kv_table import Machine
from bench.load import Figures, medians, prompts, run_round
from bench.load_http import HttpLoad, RequestFailedError, http_load
from bench.serving import WORKLOADS
from services.cli.ports import free_ports
from services.common.models import DEFAULT_MODEL

RESULTS = Path(__file__).parent / "results" / "engine_threads.json"
_WARM_TOKENS = 8


def variants(cores: int) -> list[int]:
    """One thread for each core, one core left to the others, and one thread more than there are cores."""
    return sorted({cores, max(1, cores - 1), cores + 1})


async def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    """One row for each variant and concurrency."""
    rng, workload = random.Random(arguments.seed), WORKLOADS[arguments.workload]
    source, ports = prompts(workload, rng), free_ports("127.0.0.1")
    results: dict[tuple[str, int], list[Figures]] = {}
    async with AsyncExitStack() as stack:
        loads: list[tuple[str, HttpLoad]] = []
        for threads in variants(os.cpu_count() or 1):
            flags, name = ("--threads", str(threads), "--kv-cache-mb", "512"), str(threads)
            start = mesh(folder, next(ports), flags, name=f"threads {name}")
            server: Server = await asyncio.to_thread(stack.enter_context, start)
            loads.append((name, await stack.enter_async_context(http_load(server.url, DEFAULT_MODEL))))
            await loads[-1][1].send(next(source), _WARM_TOKENS)
        for number in range(arguments.rounds):
            turn = number % len(loads)
            for concurrency in arguments.concurrency:
                for name, load in (*loads[turn:], *loads[:turn]):
                    count = max(4, 2 * concurrency)
                    found = await run_round(load.send, source, workload=workload, concurrency=concurrency, count=count)
                    results.setdefault((name, concurrency), []).append(found)
    return [
        {"threads": name, "concurrency": concurrency, "workload": workload.name, **medians(rounds).as_dict()}
        for (name, concurrency), rounds in sorted(results.items(), key=lambda item: item[0][1])
    ]


def show(rows: list[dict[str, object]]) -> None:
    """A table."""
    names = ("threads", "concurrency", "output_tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms")
    table = Table(*names)
    for row in rows:
        table.add_row(*(str(row[name]) for name in names))
    Console(width=120).print(table)


def main() -> int:
    """Exit status 1 when a request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16], help="clients at once")
    parser.add_argument("--workload", type=int, choices=range(len(WORKLOADS)), default=0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="of the prompts; default: fresh ones")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the figures go")
    arguments = parser.parse_args()
    machine = Machine.here()
    with tempfile.TemporaryDirectory(prefix="kvmesh-threads-") as name:
        try:
            rows = asyncio.run(measure(arguments, Path(name)))
        except (ExceptionGroup, RequestFailedError, OSError) as error:
            sys.stderr.write(f"engine_threads: {error}\n")
            return 1
    show(rows)
    arguments.json.parent.mkdir(exist_ok=True)
    arguments.json.write_text(json.dumps({"machine": asdict(machine), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
