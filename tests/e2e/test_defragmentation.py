"""A long prompt that no worker has the blocks for, though all together do: a running stream makes room by moving."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import openai
import pytest

from tests.support.mesh import MODEL, Mesh, total
from tests.support.sim_mesh import running_sim_mesh

# Steps are slow enough that no stream ends before the long prompt has been answered, but for a reason of its own.
ENVIRONMENT = {"KVMESH_WORKER_NUM_BLOCKS": "100", "KVMESH_WORKER_SIM_DECODE_STEP_S": "0.05"}
# Blocks are of 16 tokens: a stream holds some 26 of 100 at first and 45 at last, the long prompt wants 63.
PROMPT_WORDS, LONG_WORDS, STREAM_TOKENS = 110, 270, 300


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with running_sim_mesh("--workers", "2", state=tmp_path_factory.mktemp("mesh"), env=ENVIRONMENT) as mesh:
        yield mesh


def words(number: int, count: int) -> str:
    return " ".join(f"word{(number * 7919 + i) % 997}" for i in range(count))


async def stream(client: openai.AsyncOpenAI, number: int, at: asyncio.Queue[str]) -> str:
    """Why it ended; its worker is put into `at` with its first token."""
    reply = await client.completions.with_raw_response.create(
        model=MODEL, prompt=words(number, PROMPT_WORDS), max_tokens=STREAM_TOKENS, stream=True
    )
    finish, is_first = "", True
    async for chunk in reply.parse():
        if is_first:
            at.put_nowait(reply.headers["x-kvmesh-worker"])
        is_first, finish = False, chunk.choices[0].finish_reason or finish
    return finish


async def test_a_long_prompt_is_answered_while_the_streams_go_on(mesh: Mesh) -> None:
    gateway = mesh.of_kind("gateway")[0]["name"]
    streams: list[asyncio.Task[str]] = []
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        at: Counter[str] = Counter()
        while min(at["worker-0"], at["worker-1"]) < 2 and len(streams) < 6:
            started: asyncio.Queue[str] = asyncio.Queue()
            streams.append(asyncio.create_task(stream(client, len(streams), started)))
            at[await asyncio.wait_for(started.get(), 60)] += 1
        answer = await client.completions.create(model=MODEL, prompt=words(99, LONG_WORDS), max_tokens=4)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
        assert not any(task.done() for task in streams), "it did not wait for anybody's end"
        assert await asyncio.gather(*streams) == ["length"] * len(streams)
    assert total(mesh.metrics(gateway), "kvmesh_gateway_moves_total", outcome="moved") >= 1
