"""Exact mode through a real worker: greedy and seeded outputs are the same whoever else is served, and however.

Each request's tokens alone, with nothing cached, are what it must get in batches of 2 to 16, over prefix hits, after
its neighbours were aborted, and in a pool so small that it is computed in pieces, preempted and resumed.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from kvmesh.v1 import common_pb2

from tests.support.mesh import total
from tests.support.valkey import Valkey
from tests.support.waiting import eventually
from tests.worker.replica import Answer, WorkerProcess, running_worker

UNCACHED = {"block_root": b"", "prompt_block_ids": b""}
SAMPLINGS = (
    common_pb2.SamplingParams(temperature=0.0),
    common_pb2.SamplingParams(temperature=0.9, top_p=0.95, seed=5),
    common_pb2.SamplingParams(temperature=1.3, top_k=40, min_p=0.01, seed=11, frequency_penalty=0.5),
)
SMALL_POOL = ("--num-blocks", "16", "--step-token-budget", "33", "--max-queue-s", "100")


def prompt(number: int) -> list[int]:
    """40 to 145 token ids."""
    return [(number * 131 + i * i * 37 + i * 11) % 40_000 + 100 for i in range(40 + 7 * number)]


async def generate(worker: WorkerProcess, number: int, **changes: Any) -> Answer:
    """The answer to one of the sixteen requests."""
    # The first ones grow so much that they do not fit the small pool together.
    output = 40 if number < 6 else 16
    return await worker.generate(prompt(number), output, sampling=SAMPLINGS[number % 3], **changes)


async def together(worker: WorkerProcess, count: int, **changes: Any) -> list[Answer]:
    """The answers to the first `count` of them, at once."""
    return list(await asyncio.gather(*(generate(worker, number, **changes) for number in range(count))))


def tokens(answers: list[Answer]) -> list[dict[int, list[int]]]:
    return [answer.tokens for answer in answers]


async def test_nothing_changes_the_tokens(tmp_path: Path, valkey: Valkey) -> None:
    async with running_worker(tmp_path / "plain", valkey.url) as worker:
        alone = tokens([await generate(worker, number, **UNCACHED) for number in range(16)])
        for size in (2, 5, 16):
            assert tokens(await together(worker, size, **UNCACHED)) == alone[:size], f"{size} at once"
        assert tokens(await together(worker, 16)) == alone, "while their blocks are made reusable"
        warm = await together(worker, 16)
        assert min(answer.cached for answer in warm) >= 32
        assert tokens(warm) == alone, "after prefix hits"
        await _aborted_neighbours(worker, alone)
    async with running_worker(tmp_path / "small", valkey.url, *SMALL_POOL) as worker:
        assert worker.identity.context_length == 16 * 16, "no more than the pool holds is offered"
        assert tokens(await together(worker, 16)) == alone, "in pieces and preempted"
        await eventually(lambda: total(worker.metrics(), "kvmesh_worker_preemptions_total") > 0)
        await worker.wait_idle()
        worker.process.kill()
        await eventually(lambda: not any(Path(f"/proc/{worker.child(role)}").exists() for role in ("engine", "mover")))


async def _aborted_neighbours(worker: WorkerProcess, alone: list[dict[int, list[int]]]) -> None:
    """They end in the middle of the others' answers and their slots are used by the others."""
    calls = [
        worker.stub.Generate(worker.request(prompt(12 + number), 500), metadata=worker.metadata())
        for number in range(3)
    ]
    running = asyncio.create_task(together(worker, 8, **UNCACHED))
    for call in calls:
        while (await call.read()).WhichOneof("event") != "tokens":
            pass
        call.cancel()
    assert tokens(await running) == alone[:8], "after neighbours were aborted"
