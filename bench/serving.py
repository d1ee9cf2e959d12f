"""Measures a running mesh: `kvmesh bench`, or around gateway and Envoy with `--direct WORKER_ADDRESS`.

Two workloads: prompts of 256 unique tokens with 64 output tokens, and 1,024 shared + 64 unique with 32, warm. Figures
are medians over rounds. End-of-sequence is ignored, so that every request has the same length. An API key is taken from
OPENAI_API_KEY.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import resource
import secrets
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.load import Figures, Send, Workload, medians, prompts, run_round
from bench.load_direct import direct_load
from bench.load_http import http_load
from services.common.models import DEFAULT_MODEL
from services.common.security import MeshSecret

WORKLOADS = (Workload("256 unique, 64 out", 0, 256, 64), Workload("1024 shared + 64, 32 out", 1024, 64, 32))
_HEADER = ("workload", "c", "TTFT p50 ms", "p99 ms", "TPOT p50 ms", "tokens/s", "cached")
_WIDTHS = (26, 4, 12, 9, 12, 9, 7)


async def measure(send: Send, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every workload at every concurrency; rows are printed as they are done."""
    rng = random.Random(arguments.seed)
    rows: list[dict[str, Any]] = []
    print(_line(_HEADER))
    for workload in (WORKLOADS[index] for index in arguments.workload):
        source = prompts(workload, rng)
        cold = await run_round(send, source, workload=workload, concurrency=1, count=1)
        if workload.shared_tokens:
            print(f"  {workload.name}: cold TTFT {cold.ttft_p50_ms:.0f} ms")
        for concurrency in arguments.concurrency:
            count = max(concurrency * arguments.waves, arguments.min_requests)
            rounds = [
                await run_round(send, source, workload=workload, concurrency=concurrency, count=count)
                for _ in range(arguments.rounds)
            ]
            figures = medians(rounds)
            rows.append(_row(workload, concurrency, count, figures, rounds, cold))
            print(_line(_cells(workload, concurrency, figures)), flush=True)
    return rows


@asynccontextmanager
async def _load(arguments: argparse.Namespace) -> AsyncIterator[Send]:
    if arguments.direct:
        async with direct_load(arguments.direct, arguments.secret) as direct:
            yield direct.send
    else:
        async with http_load(arguments.url, arguments.model, os.environ.get("OPENAI_API_KEY", "")) as http:
            yield http.send


async def _run(arguments: argparse.Namespace) -> int:
    start_wall, start_cpu = time.perf_counter(), _cpu_s()
    async with _load(arguments) as send:
        rows = await measure(send, arguments)
    share = (_cpu_s() - start_cpu) / (time.perf_counter() - start_wall)
    print(f"load generator: {share:.1%} of one core")
    if arguments.json:
        document = {
            "command": " ".join(sys.argv),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
            "client_cores": round(share, 4),
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 when a request failed."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.secret = MeshSecret(arguments.secret_file.read_text().strip()) if arguments.direct else None
        return asyncio.run(_run(arguments))
    except ExceptionGroup as group:
        sys.stderr.write(f"bench: {group.exceptions[0]}\n")
    except (OSError, ValueError) as error:
        sys.stderr.write(f"bench: {error}\n")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvmesh bench", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="root of the HTTP API")
    parser.add_argument("--direct", default="", metavar="HOST:PORT", help="a worker's gRPC address, around the mesh")
    parser.add_argument(
        "--secret-file", type=Path, default=Path(".kvmesh/mesh_secret"), help="mesh secret, for --direct"
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="public name of the model")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16], help="clients at once")
    parser.add_argument(
        "--workload",
        type=int,
        nargs="+",
        choices=range(len(WORKLOADS)),
        default=[0, 1],
        help="; ".join(f"{number}: {workload.name}" for number, workload in enumerate(WORKLOADS)),
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of which medians are taken")
    parser.add_argument("--waves", type=int, default=2, help="requests of each client in a round")
    parser.add_argument("--min-requests", type=int, default=6, help="fewest requests of a round")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="of the prompts; default: fresh ones")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser


def _row(
    workload: Workload, concurrency: int, count: int, figures: Figures, rounds: list[Figures], cold: Figures
) -> dict[str, Any]:
    return {
        "workload": workload.name,
        "concurrency": concurrency,
        "requests": count,
        "cold_ttft_ms": round(cold.ttft_p50_ms, 2),
        **figures.as_dict(),
        "rounds": [one.as_dict() for one in rounds],
    }


def _cells(workload: Workload, concurrency: int, figures: Figures) -> tuple[str, ...]:
    return (
        workload.name,
        str(concurrency),
        f"{figures.ttft_p50_ms:.1f}",
        f"{figures.ttft_p99_ms:.1f}",
        f"{figures.tpot_p50_ms:.2f}",
        f"{figures.output_tokens_per_s:.1f}",
        f"{figures.cached_tokens:.0f}",
    )


def _line(cells: Sequence[str]) -> str:
    first, *others = zip(cells, _WIDTHS, strict=True)
    return first[0].ljust(first[1]) + " ".join(cell.rjust(width) for cell, width in others)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    sys.exit(main())
