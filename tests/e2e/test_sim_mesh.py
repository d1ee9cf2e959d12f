"""Three simulated workers behind the real edge: what tests of drain, canary and loss build on."""

from __future__ import annotations

import asyncio
import signal

import openai

from tests.support.mesh import MODEL, Mesh, total, wait_for
from tests.support.waiting import eventually

REQUESTS = 24
# Where requests go is the router's affair: of so many rounds every worker has got some.
ROUNDS = 5


async def ask(client: openai.AsyncOpenAI, number: int, max_tokens: int, started: set[int]) -> int:
    """Output tokens of one streamed answer; `number` is in `started` from its first token on."""
    words = " ".join(f"word{(number * 7919 + i) % 997}" for i in range(60))
    stream = await client.completions.create(
        model=MODEL, prompt=words, max_tokens=max_tokens, stream=True, stream_options={"include_usage": True}
    )
    completed = 0
    async for chunk in stream:
        started.add(number)
        if chunk.usage is not None:
            completed = chunk.usage.completion_tokens
    return completed


async def ask_all(mesh: Mesh, max_tokens: int, started: set[int]) -> list[int]:
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        return await asyncio.gather(*(ask(client, number, max_tokens, started) for number in range(REQUESTS)))


async def test_every_worker_answers_and_the_loss_of_one_loses_no_answer(sim_mesh: Mesh) -> None:
    served = [0.0]
    for _ in range(ROUNDS):
        assert await ask_all(sim_mesh, 10, set()) == [10] * REQUESTS
        served = [total(sim_mesh.metrics(w["name"]), "kvmesh_prompt_tokens_total") for w in sim_mesh.of_kind("worker")]
        if all(served):
            break
    assert len(served) == 3
    assert all(served), served
    before, started = sim_mesh.process("worker-1")["pid"], set[int]()
    answers = asyncio.create_task(ask_all(sim_mesh, 100, started))
    # An answer takes a second and more from its first token on.
    await eventually(lambda: len(started) == REQUESTS)
    sim_mesh.kill("worker-1", signal.SIGKILL)
    assert await answers == [100] * REQUESTS
    wait_for(lambda: sim_mesh.process("worker-1")["pid"] not in (None, before), within_s=60, what="a new worker")
    sim_mesh.wait_ready()
