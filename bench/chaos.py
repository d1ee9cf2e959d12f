"""`python -m bench.chaos`: streams through Envoy while workers are killed, stopped and cut off.

Three CPU workers with one thread each. Sixteen jobs, half greedy and half seeded at temperature 1, are answered first
undisturbed; then clients ask them again and again while every ten seconds, whenever two workers are ready, a random
worker or child of one is killed (SIGKILL), stopped (SIGSTOP; the supervisor replaces what is silent) or its gRPC port
cut off. Each text is compared with the undisturbed one. The pause of a stream is the longest time between two of its
events; it is given for all streams, for those that a fault fell into, and for the undisturbed ones of the first run.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.chaos_faults import Fault, Faults, own_network
from bench.chaos_streams import Answer, ask, difference, percentile
from bench.kv_table import Machine
from services.cli.ports import free_ports

RESULTS = Path(__file__).parent / "results" / "chaos.json"
_JOBS = 16
_COMMAND_TIMEOUT_S = 300.0


async def undisturbed(port: int, tokens: int, streams: int) -> list[Answer]:
    """Every job once. Raises RuntimeError when one fails."""
    gate = asyncio.Semaphore(streams)

    async def one(job: int) -> Answer:
        async with gate:
            return await ask(port, job, tokens)

    answers = await asyncio.gather(*map(one, range(_JOBS)))
    if failed := [answer.error for answer in answers if answer.error]:
        raise RuntimeError(f"without any fault: {failed[0]}")
    return answers


async def disturbed(port: int, tokens: int, streams: int, faults: Faults, seconds: float) -> list[Answer]:
    """Answers of clients that ask for so long; each finishes what it has begun, still under faults."""
    jobs, ends_s = itertools.cycle(range(_JOBS)), time.monotonic() + seconds
    answers: list[Answer] = []

    async def client() -> None:
        while time.monotonic() < ends_s:
            answers.append(await ask(port, next(jobs), tokens))

    making = asyncio.create_task(faults.run())
    await asyncio.gather(*(client() for _ in range(streams)))
    making.cancel()
    ended = (await asyncio.gather(making, return_exceptions=True))[0]
    if not isinstance(ended, asyncio.CancelledError):
        raise RuntimeError("faults could not be made") from ended
    return answers


def summary(reference: Sequence[Answer], answers: Sequence[Answer], faults: Sequence[Fault]) -> dict[str, Any]:
    """Counts, and pauses in ms."""
    expected = {answer.job: answer.text for answer in reference}
    wrong = Counter(difference(a.text, expected[a.job]) for a in answers if a.done and not a.error)
    struck = [a for a in answers if any(a.started_s < fault.at_s < a.ended_s for fault in faults)]
    return {
        "streams": len(answers),
        "streams_in_faults": len(struck),
        "faults": dict(Counter(f"{fault.kind} {fault.part}" for fault in faults)),
        "errors": dict(Counter(a.error[:120] for a in answers if a.error)),
        "equal": wrong[""],
        "duplicates": wrong["duplicate"],
        "gaps": wrong["gap"],
        "other_texts": wrong["other"],
        "pause_ms": {
            name: {share: _ms(percentile([a.pause_s for a in some], int(share[1:]) / 100)) for share in ("p50", "p99")}
            for name, some in (("undisturbed", reference), ("all", answers), ("in faults", struck))
        },
    }


def main(argv: Sequence[str]) -> int:
    """Run, print, write the file; 1 when a stream failed or its text was another."""
    parser = argparse.ArgumentParser(prog="bench.chaos", description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long faults are made (10)")
    parser.add_argument("--streams", type=int, default=8, help="clients at once (8)")
    parser.add_argument("--tokens", type=int, default=160, help="of each answer (160)")
    parser.add_argument("--every-s", type=float, default=10.0, help="between faults (10)")
    parser.add_argument("--seed", type=int, default=1, help="of the faults (1)")
    parser.add_argument("--json", type=Path, default=RESULTS, help=f"where the result goes ({RESULTS.name})")
    given = parser.parse_args(argv)
    can_cut, machine = own_network(), Machine.here()
    with _mesh() as (port, folder):
        faults = Faults(lambda: _processes(folder), given.every_s, can_cut, random.Random(given.seed))
        reference = asyncio.run(undisturbed(port, given.tokens, given.streams))
        answers = asyncio.run(disturbed(port, given.tokens, given.streams, faults, given.minutes * 60))
    found = summary(reference, answers, faults.made)
    given.json.parent.mkdir(exist_ok=True)
    options = {name: value for name, value in vars(given).items() if name != "json"}
    written = {"machine": asdict(machine), "options": options, "cuts_possible": can_cut, **found}
    given.json.write_text(json.dumps(written, indent=1) + "\n")
    _show(found)
    return 0 if found["equal"] == found["streams"] else 1


@contextmanager
def _mesh() -> Iterator[tuple[int, str]]:
    with tempfile.TemporaryDirectory(prefix="kvm-") as folder:
        port = next(free_ports())
        _kvmesh(folder, "up", "--detach", "--workers", "3", "--threads", "1", "--http-port", str(port))
        try:
            yield port, folder
        finally:
            _kvmesh(folder, "down")


def _processes(folder: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(_kvmesh(folder, "ps", "--json"))
    return found


def _kvmesh(folder: str, *arguments: str) -> str:
    command = (sys.executable, "-m", "services.cli", *arguments, "--state", folder)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("KVMESH_", "REDIS_"))}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"kvmesh {arguments[0]}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _show(found: dict[str, Any]) -> None:
    table = Table(title="Streams while workers are killed, stopped and cut off", show_header=False)
    for name, value in found.items():
        table.add_row(name.replace("_", " "), json.dumps(value, indent=1) if isinstance(value, dict) else str(value))
    Console().print(table)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
