"""Redis is away, silent or dead, and prompts are still computed by one worker for another, or for one that has died.

Simulated workers answer by a hash of the seed and the position, so that a wrong continuation shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.chaos_jobs import COMPLETIONS
from bench.chaos_streams import Answer, ask, difference
from tests.support.mesh import MODEL, Mesh, total
from tests.support.sim_mesh import running_sim_mesh
from tests.support.valkey import Valkey
from tests.support.waiting import eventually

STREAMS, STREAM_TOKENS = 4, 5000
LONG_WORDS, LONG_TOKENS = 700, 40
# The router goes by the load of the moment, and so do handoffs.
TRIES = 12
# Prompts take so long that a worker with streams is spared them.
POOLS = ("--workers", "0", "--prefill-workers", "2", "--decode-workers", "1")
ENVIRONMENT = {"KVMESH_WORKER_SIM_TRANSFERS": "true", "KVMESH_WORKER_SIM_PREFILL_TOKENS_PER_S": "2000"}


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    server = Valkey(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def pools(valkey: Valkey) -> Iterator[Mesh]:
    with running_sim_mesh(*POOLS, "--redis", valkey.url, env=ENVIRONMENT) as running:
        yield running


async def said(mesh: Mesh, answer: Answer, prompt: str, tokens: int) -> Answer:
    """What it says depends on the number of its job alone."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "seed": answer.job, "ignore_eos": True}
    return await ask(mesh.port, COMPLETIONS, {**body, "stream": True}, answer)


async def told(mesh: Mesh, number: int) -> Answer:
    """The answer to a long prompt."""
    words = " ".join(f"{(number * 7919 + i * i) % 1000}" for i in range(LONG_WORDS))
    return await said(mesh, Answer(number), f"Case {number}: {words}", LONG_TOKENS)


@pytest.mark.parametrize("how", ["silent", "dead"])
async def test_handoffs_go_on(pools: Mesh, valkey: Valkey, how: str) -> None:
    running = [Answer(number) for number in range(STREAMS)]
    tasks = [asyncio.create_task(said(pools, one, f"Story {one.job}", STREAM_TOKENS)) for one in running]

    def handoffs(outcome: str) -> float:
        return total(pools.metrics("gateway-0"), "kvmesh_gateway_handoffs_total", outcome=outcome)

    try:
        await eventually(lambda: all(one.begun.is_set() for one in running), 60.0, 0.02)
        if how == "silent":
            valkey.pause()
        else:
            valkey.kill()
        answers: list[Answer] = []
        while not handoffs("completed") and len(answers) < TRIES:
            answers.append(await told(pools, len(answers)))
        assert handoffs("completed"), [one.error for one in answers]
        number = len(answers)
        last = [asyncio.create_task(told(pools, number + one)) for one in range(4)]
        # Whatever it does for them then.
        pools.kill("worker-0")
        answers += await asyncio.gather(*last)
        assert [one.error for one in (*answers, *running)] == [""] * (len(answers) + STREAMS)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if how == "silent":
        valkey.resume()
    else:
        valkey.start()
    again = await asyncio.gather(*(told(pools, one.job) for one in answers))
    assert [difference(one, other) for one, other in zip(answers, again, strict=True)] == [""] * len(answers)
