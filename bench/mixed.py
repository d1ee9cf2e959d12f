"""`python -m bench.mixed`: two models and three adapters under mixed load, each answer compared with its own alone.

Three CPU workers with one thread each, two of the default model and one of another (the first layers of the same), and
three random adapters of the first, of which a worker keeps two in memory. Each of the five names is asked the same, all
kinds of `bench.mixed_jobs`: first every job alone, one request at a time; then clients of several tenants ask random
ones. Each answer must equal the one alone, whole: texts, finish reasons, log probabilities, tokens, vectors. At the end
nothing may be held anywhere, and no process may have grown from the middle of the load to its end.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.chaos_jobs import Job
from bench.chaos_streams import Answer, ask, difference
from bench.export_model import export
from bench.fault_mesh import Books, LocalMesh, dumped
from bench.kv_table import Machine
from bench.local_mesh import pids_of, run_kvmesh, started
from bench.mixed_jobs import first_turn, model_jobs, next_turn
from bench.process_memory import Growth, MemoryLog
from bench.random_adapters import write_random_adapter
from services.common.bearer_keys import hash_key
from services.common.models import DEFAULT_MODEL, resolve_model
from services.worker.model.model_files import open_model

RESULTS = Path(__file__).parent / "results" / "mixed.json"
OTHER, OTHER_LAYERS = "other", 12
ADAPTERS = ("red", "green", "blue")
MODELS = (DEFAULT_MODEL, OTHER, *(f"{DEFAULT_MODEL}:{name}" for name in ADAPTERS))
TENANTS = ("first", "second", "third")
# For which answers with a key are kept, so that the end need not wait long for them.
_WINDOW_S = 20.0
_READY_S, _SETTLE_S, _SAMPLE_S = 180.0, 60.0, 5.0
_ENVIRONMENT = {
    "KVMESH_GATEWAY_IDEMPOTENCY_WINDOW_S": f"{_WINDOW_S:g}",
    "KVMESH_WORKER_MAX_ADAPTERS": "2",
    "KVMESH_WORKER_POOLING": "mean",
    "KVMESH_WORKER_SPECULATION": "ngram",
    "KVMESH_LOG_LEVEL": "WARNING",
}
_OPTIONS = ("--workers", "3", "--threads", "1", "--kv-cache-mb", "64", "--kvstore-mb", "64")


class Mixture:
    """Jobs and their answers. rng: which job is next, and whose it is."""

    def __init__(self, port: int, tokens: int, rng: random.Random) -> None:
        self._port = port
        self._tokens = tokens
        self._rng = rng
        self._keys = itertools.count()
        self.jobs: list[Job] = []
        self.alone: dict[int, Answer] = {}
        self.answers: list[Answer] = []

    async def learn(self) -> None:
        """Every job of every model, one request at a time. Raises RuntimeError when one fails."""
        for model in MODELS:
            for job in model_jobs(model, self._tokens, len(self.jobs)):
                answer = await self._learn(job)
                if job.kind.cuts:
                    # Asked once more, to be cut in what it says whole.
                    self.jobs.pop()
                    await self._learn(job.stopping_in(answer.text))
            turn: Job | None = first_turn(model, self._tokens, len(self.jobs))
            while turn is not None:
                answer = await self._learn(turn)
                turn = next_turn(turn, answer.text, len(self.jobs))

    async def ask_until(self, ends_s: float, streams: int) -> None:
        """So many clients ask one random job after another; each finishes what it has begun. ends_s: monotonic."""

        async def client() -> None:
            while time.monotonic() < ends_s:
                self.answers.append(await self._ask(self._rng.choice(self.jobs)))

        await asyncio.gather(*(client() for _ in range(streams)))

    async def _learn(self, job: Job) -> Answer:
        answer = await self._ask(job)
        if answer.error:
            raise RuntimeError(f"alone, {job.kind.name} of {job.body['model']}: {answer.error}")
        self.jobs.append(job)
        self.alone[job.number] = answer
        return answer

    async def _ask(self, job: Job) -> Answer:
        headers = {"authorization": f"Bearer {self._rng.choice(TENANTS)}"}
        if job.kind.is_keyed:
            headers["idempotency-key"] = f"{job.number}-{next(self._keys)}"
        return await ask(self._port, job.kind.path, job.body, Answer(job.number, job.kind.name), headers=headers)


async def run(mesh: LocalMesh, mixture: Mixture, minutes: float, streams: int) -> tuple[MemoryLog, Books, float]:
    """Memory during the load, what is held after it, and seconds that the jobs took alone."""
    await mesh.wait_ready(_READY_S)
    started_s = time.monotonic()
    await mixture.learn()
    alone_s = time.monotonic() - started_s
    memory = MemoryLog()
    watching = asyncio.create_task(_watch(mesh, memory))
    try:
        await mixture.ask_until(time.monotonic() + minutes * 60, streams)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    await asyncio.sleep(_WINDOW_S)
    return memory, await mesh.settled(_SETTLE_S), alone_s


async def _watch(mesh: LocalMesh, memory: MemoryLog) -> None:
    while True:
        memory.take(pids_of(await mesh.processes()))
        await asyncio.sleep(_SAMPLE_S)


def summary(jobs: Sequence[Job], alone: Mapping[int, Answer], answers: Sequence[Answer]) -> dict[str, Any]:
    """Counts of answers, by model and kind, and of how they differ."""
    models = {job.number: job.body["model"] for job in jobs}
    complete = [answer for answer in answers if answer.done and not answer.error]
    found = [(answer, difference(answer, alone[answer.job])) for answer in complete]
    return {
        "jobs": len(jobs),
        "answers": len(answers),
        "complete": len(complete),
        "equal": sum(not how for _, how in found),
        "alike_alone": _alike(jobs, alone),
        "differing": dict(Counter(f"{models[a.job]}, {a.kind}: {how}" for a, how in found if how)),
        "errors": dict(Counter(f"{models[a.job]}, {a.kind}: {a.error[:120]}" for a in answers if a.error)),
        "refused_and_asked_again": sum(answer.refusals for answer in answers),
        "repeated_with_key": sum(answer.repeats for answer in answers),
        "by_model": dict(Counter(models[answer.job] for answer in complete)),
        "by_kind": dict(Counter(answer.kind for answer in complete)),
    }


def _alike(jobs: Sequence[Job], alone: Mapping[int, Answer]) -> dict[str, int]:
    """Answers alone that another model gave word for word, by kind: a mixture of those two could not be seen."""
    said = Counter((alone[job.number].kind, repr(alone[job.number].choices)) for job in jobs)
    alike: Counter[str] = Counter()
    for (kind, _), count in said.items():
        alike[kind] += count if count > 1 else 0
    return {kind: count for kind, count in alike.items() if count}


def main(argv: Sequence[str]) -> int:
    """Run, print, write the file; 1 when an answer failed or was another one, or something is held or has grown."""
    given = _parser().parse_args(argv)
    machine = Machine.here()
    with _mesh() as mesh:
        mixture = Mixture(mesh.port, given.tokens, random.Random(given.seed))
        memory, books, alone_s = asyncio.run(run(mesh, mixture, given.minutes, given.streams))
    growth = memory.growth()
    found = summary(mixture.jobs, mixture.alone, mixture.answers) | at_the_end(books, growth)
    found["alone_s"] = round(alone_s, 1)
    if given.json is not None:
        options = {name: value for name, value in vars(given).items() if name != "json"}
        written = {"machine": asdict(machine), "options": options, **found}
        written["memory_mib"] = {name: asdict(one) for name, one in growth.items()}
        given.json.write_text(json.dumps(written, indent=1) + "\n")
    _show(found, growth)
    return 0 if is_right(found) else 1


def at_the_end(books: Books, growth: Mapping[str, Growth]) -> dict[str, Any]:
    """What is still held, who did not answer, and which processes have grown."""
    return {
        "held_at_the_end": dict(books.held),
        "silent_at_the_end": list(books.silent),
        "grown": [name for name, one in growth.items() if one.is_leak],
    }


def is_right(found: Mapping[str, Any]) -> bool:
    """Of `summary` and `at_the_end` together: every answer equal, nothing held, nothing grown."""
    left = (found["held_at_the_end"], found["silent_at_the_end"], found["grown"])
    return found["equal"] == found["answers"] and not any(left)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.mixed", description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=10.0, help="of mixed load (10)")
    parser.add_argument("--streams", type=int, default=8, help="clients at once (8)")
    parser.add_argument(
        "--tokens", type=int, default=24, help="of each choice, but for some that may end by themselves (24)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the mixture (1)")
    parser.add_argument("--json", type=Path, help=f"where the result goes, such as {RESULTS.name}")
    return parser


@contextmanager
def _mesh() -> Iterator[LocalMesh]:
    with tempfile.TemporaryDirectory(prefix="kvm-") as name:
        folder = Path(name)
        source = resolve_model(DEFAULT_MODEL)
        export(source, folder / OTHER, OTHER_LAYERS)
        keys = folder / "keys"
        keys.write_text("".join(f"{hash_key(tenant)} {tenant}\n" for tenant in TENANTS))
        models = ("--model", DEFAULT_MODEL, "--model", f"{OTHER}={folder / OTHER}")
        environment = {**_ENVIRONMENT, "KVMESH_GATEWAY_KEYS_FILE": str(keys)}
        with started((*_OPTIONS, *models), environment) as (state, port, given):
            config = open_model(source.path).config
            for seed, adapter in enumerate(ADAPTERS):
                path = write_random_adapter(folder / adapter, config, seed=seed)
                run_kvmesh(state, given, "ctl", "adapter", "add", adapter, str(path), "--model", DEFAULT_MODEL)
            yield LocalMesh(state, port)


def _show(found: Mapping[str, Any], growth: Mapping[str, Growth]) -> None:
    table = Table(title="Two models and three adapters under mixed load", show_header=False)
    for name, value in found.items():
        table.add_row(name.replace("_", " "), dumped(value))
    memory = Table("process", "resident, start", "end", "private, start", "middle", "end", "second half", title="MiB")
    for name, one in growth.items():
        figures = (one.resident_start, one.resident_end, one.private_start, one.private_middle, one.private_end)
        memory.add_row(name, *(f"{mib:.1f}" for mib in figures), f"{one.late:+.1f} ({one.late_share:+.1%})")
    console = Console(width=120)
    console.print(table)
    console.print(memory)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
