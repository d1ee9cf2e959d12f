"""`python -m bench.chaos`: requests through Envoy while processes of the mesh are killed, stopped and cut off.

Three CPU workers with one thread each. Jobs of every kind (`bench.chaos_jobs`) are answered first undisturbed; then
clients ask them again and again while every ten seconds, wherever two of a kind are ready, a random process is killed
(SIGKILL), stopped (SIGSTOP; the supervisor replaces what is silent) or, of a worker, its gRPC port cut off. With
`--redis-away` Valkey is gone for a while in the middle. Each answer is compared whole with the undisturbed one: texts,
finish reasons, log probabilities, tokens. The pause of a stream is the longest time between two of its events; it is
given for all, for those that a fault fell into, and for the undisturbed ones of the first run. At the end nothing may
be held anywhere.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import sys
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
from bench.chaos_jobs import KINDS, Job, make_jobs
from bench.chaos_redis import OwnRedis, own_redis
from bench.chaos_streams import Answer, ask, difference, percentile
from bench.fault_mesh import Books, LocalMesh, dumped, local_mesh
from bench.kv_table import Machine

RESULTS = Path(__file__).parent / "results" / "chaos.json"
_PROCESS_KINDS = ("worker", "child", "router", "gateway", "kvstore")
# For which answers with a key are kept, so that the end need not wait long for them.
_WINDOW_S = 20.0
_READY_S, _SETTLE_S = 180.0, 60.0
_TWIN_SHARE, _TWIN_S = 0.5, 1.0


class Clients:
    """What all clients of a run share. rng: of which keyed requests are asked twice."""

    def __init__(self, port: int, jobs: Sequence[Job], rng: random.Random, *, all_keyed: bool) -> None:
        """all_keyed: every request has a key, and so survives its gateway."""
        self._port = port
        self._rng = rng
        self._all_keyed = all_keyed
        self._keys = itertools.count()
        self.jobs = list(jobs)
        self.answers: list[Answer] = []

    async def undisturbed(self, streams: int) -> dict[int, Answer]:
        """Every job once, by number. Raises RuntimeError when one fails."""
        gate = asyncio.Semaphore(streams)

        async def one(position: int) -> Answer:
            async with gate:
                return await self._learn(position)

        answers = await asyncio.gather(*map(one, range(len(self.jobs))))
        if failed := [answer.error for answer in answers if answer.error]:
            raise RuntimeError(f"without any fault: {failed[0]}")
        return {answer.job: answer for answer in answers}

    async def ask_until(self, ends_s: float, streams: int) -> None:
        """So many clients ask one job after another; each finishes what it has begun. ends_s: monotonic."""
        jobs = itertools.cycle(self.jobs)

        async def client() -> None:
            while time.monotonic() < ends_s:
                await self._ask_maybe_twice(next(jobs))

        await asyncio.gather(*(client() for _ in range(streams)))

    async def _learn(self, position: int) -> Answer:
        """A job that is to be cut is cut in what it says whole."""
        job = self.jobs[position]
        answer = await self._ask(job, key="")
        if job.kind.cuts and not answer.error:
            job = self.jobs[position] = job.stopping_in(answer.text)
            answer = await self._ask(job, key="")
        return answer

    async def _ask_maybe_twice(self, job: Job) -> None:
        key = f"{job.number}-{next(self._keys)}" if job.kind.is_keyed or self._all_keyed else ""
        asked = [self._ask(job, key)]
        if job.kind.is_keyed and self._rng.random() < _TWIN_SHARE:
            asked.append(self._ask(job, key, self._rng.uniform(0.0, _TWIN_S)))
        self.answers += await asyncio.gather(*asked)

    async def _ask(self, job: Job, key: str, after_s: float = 0.0) -> Answer:
        await asyncio.sleep(after_s)
        headers = {"idempotency-key": key} if key else {}
        answer = Answer(job.number, job.kind.name)
        return await ask(self._port, job.kind.path, job.body, answer, headers=headers)


async def run(mesh: LocalMesh, clients: Clients, faults: Faults, given: argparse.Namespace, redis: OwnRedis | None) -> (
    tuple[dict[int, Answer], Books]
):  # fmt: skip
    """The undisturbed answers, and what is held at the end. Raises RuntimeError when faults could not be made."""
    reference = await clients.undisturbed(given.streams)
    making = [asyncio.create_task(faults.run())]
    if redis is not None:
        making.append(asyncio.create_task(_away(redis, given, faults)))
    await clients.ask_until(time.monotonic() + given.minutes * 60, given.streams)
    for task in making:
        task.cancel()
    for ended in await asyncio.gather(*making, return_exceptions=True):
        if isinstance(ended, Exception):
            raise RuntimeError("faults could not be made") from ended
    with contextlib.suppress(TimeoutError):
        await mesh.wait_ready(_READY_S)
    await asyncio.sleep(_WINDOW_S)
    return reference, await mesh.settled(_SETTLE_S)


async def _away(redis: OwnRedis, given: argparse.Namespace, faults: Faults) -> None:
    await asyncio.sleep(max(0.0, given.minutes * 30 - given.redis_away / 2))
    faults.made.append(Fault(given.redis_fault, "redis", f"for {given.redis_away:g} s", time.monotonic()))
    await redis.away(given.redis_fault, given.redis_away)


def summary(reference: dict[int, Answer], answers: Sequence[Answer], faults: Sequence[Fault]) -> dict[str, Any]:
    """Counts, and pauses in ms."""
    complete = [answer for answer in answers if answer.done and not answer.error]
    differing = Counter(difference(answer, reference[answer.job]) for answer in complete)
    streamed = [answer for answer in answers if answer.events > 1]
    struck = [a for a in streamed if any(a.started_s < fault.at_s < a.ended_s for fault in faults)]
    apart = [answer for answer in reference.values() if answer.events > 1]
    return {
        "streams": len(answers),
        "complete": len(complete),
        "streams_in_faults": len(struck),
        "by_kind": dict(Counter(answer.kind for answer in complete)),
        "faults": dict(Counter(f"{fault.kind} {fault.part}" for fault in faults)),
        "errors": dict(Counter(f"{a.kind}: {a.error[:120]}" for a in answers if a.error)),
        "refused_and_asked_again": sum(answer.refusals for answer in answers),
        "repeated_with_key": sum(answer.repeats for answer in answers),
        "equal": differing[""],
        "duplicates": differing["duplicate"],
        "gaps": differing["gap"],
        "other_differences": {name: count for name, count in differing.items() if name not in ("", "duplicate", "gap")},
        "pause_ms": {
            name: {share: _ms(percentile([a.pause_s for a in some], int(share[1:]) / 100)) for share in ("p50", "p99")}
            for name, some in (("undisturbed", apart), ("all", streamed), ("in faults", struck))
        },
    }


def main(argv: Sequence[str]) -> int:
    """Run, print, write the file; 1 when an answer failed or was another one, or something is held at the end."""
    given = _parser().parse_args(argv)
    can_cut, machine, rng = own_network(), Machine.here(), random.Random(given.seed)
    with _mesh(given) as (mesh, redis):
        faults = Faults(mesh, given.process_kinds, given.every_s, can_cut, rng)
        jobs = make_jobs([kind for kind in KINDS if kind.name in given.kinds], given.tokens)
        clients = Clients(mesh.port, jobs, random.Random(given.seed), all_keyed="gateway" in given.process_kinds)
        reference, books = asyncio.run(run(mesh, clients, faults, given, redis))
    found = summary(reference, clients.answers, faults.made)
    found |= {"held_at_the_end": dict(books.held), "silent_at_the_end": list(books.silent), "kept": books.kept}
    given.json.parent.mkdir(exist_ok=True)
    options = {name: value for name, value in vars(given).items() if name != "json"}
    written = {"machine": asdict(machine), "options": options, "cuts_possible": can_cut, **found}
    given.json.write_text(json.dumps(written, indent=1) + "\n")
    _show(found)
    return 0 if found["equal"] == found["streams"] and books.is_clear else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.chaos", description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long faults are made (10)")
    parser.add_argument("--streams", type=int, default=8, help="clients at once (8)")
    parser.add_argument("--tokens", type=int, default=160, help="of each choice (160)")
    parser.add_argument("--every-s", type=float, default=10.0, help="between faults (10)")
    parser.add_argument("--seed", type=int, default=1, help="of the faults (1)")
    parser.add_argument("--kinds", nargs="+", metavar="KIND", choices=_names(), default=_names(), help=f"of requests: {', '.join(_names())} (all)")  # fmt: skip # noqa: E501
    parser.add_argument("--process-kinds", type=_process_kinds, default=_PROCESS_KINDS[:2], help=f"what is struck, with commas: {', '.join(_PROCESS_KINDS)} (worker,child); there are two of each that is named")  # fmt: skip # noqa: E501
    parser.add_argument("--redis-away", type=float, default=0.0, metavar="S", help="seconds for which Valkey is gone in the middle (0)")  # fmt: skip # noqa: E501
    parser.add_argument("--redis-fault", choices=("stopped", "killed"), default="stopped", help="how it goes (stopped)")
    parser.add_argument("--json", type=Path, default=RESULTS, help=f"where the result goes ({RESULTS.name})")
    return parser


def _names() -> list[str]:
    return [kind.name for kind in KINDS]


def _process_kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(text.split(","))
    if unknown := set(kinds) - set(_PROCESS_KINDS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not among {', '.join(_PROCESS_KINDS)}")
    return kinds


@contextmanager
def _mesh(given: argparse.Namespace) -> Iterator[tuple[LocalMesh, OwnRedis | None]]:
    numbers = {kind: "2" for kind in ("router", "gateway", "kvstore") if kind in given.process_kinds}
    options = ["--workers", "3", "--threads", "1", *(part for k, n in numbers.items() for part in (f"--{k}s", n))]
    environment = {"KVMESH_GATEWAY_IDEMPOTENCY_WINDOW_S": f"{_WINDOW_S:g}"}
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(own_redis()) if given.redis_away else None
        if redis is not None:
            options += ["--redis", redis.url]
        yield stack.enter_context(local_mesh(options, environment)), redis


def _show(found: dict[str, Any]) -> None:
    table = Table(title="Requests while processes are killed, stopped and cut off", show_header=False)
    for name, value in found.items():
        table.add_row(name.replace("_", " "), dumped(value))
    Console().print(table)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
