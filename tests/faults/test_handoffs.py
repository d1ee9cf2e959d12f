"""A worker for prompts and one for outputs, as real processes over UCX: what they say together, and what faults do.

Streams run all the time on the worker that answers, so that the router spares it the long prompts.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.faults.test_kills import events
from tests.support.mesh import Mesh, running_mesh, scrape, total, wait_for
from tests.support.waiting import eventually

PREFILL, DECODE = "worker-0", "worker-1"
MAX_TOKENS = 24
STREAMS = 4
# The router goes by the speed of the moment, and so do handoffs; of so many requests one is split, and comes through.
TRIES = 12
numbers = itertools.count()


class Pools:
    """A mesh and where its processes show their figures, which stays when they start anew."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._addresses = {entry["name"]: entry["metrics"] for entry in mesh.ps()}

    def metrics(self, name: str) -> dict[str, float]:
        """Without asking for the processes, which takes a while that a client on the same loop does not have."""
        return scrape(self._addresses[name])

    def pid(self, name: str, role: str = "front") -> int:
        """Of a worker's process now; 0 while there is none."""
        entry = self.mesh.process(name)
        pids = {"front": entry["pid"], **{child["role"]: child["pid"] for child in entry["children"]}}
        return int(pids.get(role) or 0)


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    options = ("--prefill-workers", "1", "--decode-workers", "1", "--kvstores", "0")
    env = {
        "KVMESH_MOVER_TRANSPORT": "ucx",
        "KVMESH_WORKER_STEP_TOKEN_BUDGET": "64",
        # Killed workers show by their connections; a busy machine is not to look like a dead one.
        "KVMESH_GATEWAY_WORKER_SILENCE_S": "5",
    }
    with running_mesh(tmp_path_factory.mktemp("mesh"), *options, env=env) as running:
        yield Pools(running)


def body(**fields: object) -> dict[str, object]:
    """A request with a prompt of about 700 tokens that no other has."""
    number = next(numbers)
    text = " ".join(f"{(number * 7919 + i * i) % 1000}" for i in range(200))
    return {"prompt": f"Case {number}: {text}", "max_tokens": MAX_TOKENS, "ignore_eos": True, **fields}


async def said(pools: Pools, request: dict[str, object]) -> dict[int, str]:
    """The text of each choice."""
    texts: dict[int, str] = {}
    done = False
    async with asyncio.timeout(180):
        async for _, data in events(pools.mesh, request):
            if data == "[DONE]":
                done = True
                continue
            event: dict[str, Any] = json.loads(data)
            assert "error" not in event, event
            for choice in event["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert done
    return texts


@asynccontextmanager
async def running_streams(pools: Pools) -> AsyncIterator[None]:
    """Somebody to be spared."""
    started = [asyncio.Event() for _ in range(STREAMS)]

    async def run(number: int) -> None:
        request = {"prompt": f"Story {number} without end:", "max_tokens": 3000, "ignore_eos": True}
        async for _, _ in events(pools.mesh, request):
            started[number].set()

    tasks = [asyncio.create_task(run(number)) for number in range(STREAMS)]
    try:
        async with asyncio.timeout(90):
            await asyncio.gather(*(event.wait() for event in started))
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def handoffs(pools: Pools, outcome: str) -> float:
    """How many have ended so."""
    return total(pools.metrics("gateway-0"), "kvmesh_gateway_handoffs_total", outcome=outcome)


@asynccontextmanager
async def handed_over(pools: Pools, **fields: object) -> AsyncIterator[tuple[dict[str, object], asyncio.Task[Any]]]:
    """A request, and its answer under way, whose handoff has started."""
    for _ in range(TRIES):
        request, started = body(**fields), handoffs(pools, "started")
        answer = asyncio.create_task(said(pools, request))
        try:
            await eventually(lambda: handoffs(pools, "started") > started or answer.done(), 30.0, 0.05)  # noqa: B023
            if handoffs(pools, "started") > started:
                yield request, answer
                return
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)
    raise AssertionError(f"nothing was handed over: {pools.mesh.logs()[-3000:]}")


async def answered_by_two(pools: Pools, **fields: object) -> tuple[dict[str, object], dict[int, str]]:
    """A request whose handoff was completed, and what was said."""
    for _ in range(TRIES):
        completed = handoffs(pools, "completed")
        async with handed_over(pools, **fields) as (request, answer):
            texts = await answer
        if handoffs(pools, "completed") > completed:
            return request, texts
    raise AssertionError(f"no handoff was completed: {pools.mesh.logs()[-3000:]}")


async def answered_by_one(pools: Pools, request: dict[str, object]) -> dict[int, str]:
    """What a mesh without load says to it: an idle worker does all."""
    for _ in range(TRIES):
        started = handoffs(pools, "started")
        texts = await said(pools, request)
        if handoffs(pools, "started") == started:
            return texts
    raise AssertionError("an idle worker did not do all")


def wait_idle(pools: Pools) -> None:
    """Until nothing is held anywhere."""

    def is_idle() -> bool:
        held = ("kvmesh_worker_referenced_blocks", "kvmesh_worker_running_requests", "kvmesh_worker_waiting_requests")
        leases = ("kvmesh_mover_open_leases", "kvmesh_mover_running_pulls")
        try:
            samples = [pools.metrics(name) for name in (PREFILL, DECODE)]
        except OSError:
            return False
        idle = all(total(sample, name) == 0 for sample in samples for name in (*held, *leases))
        return idle and total(pools.metrics("gateway-0"), "kvmesh_gateway_inflight_requests") == 0

    pools.mesh.wait_ready()
    wait_for(is_idle, within_s=120, what="nothing is held")


async def test_pools_say_what_one_worker_says(pools: Pools) -> None:
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 11},
        {"temperature": 1.0, "seed": 12, "n": 2},
    ]
    async with running_streams(pools):
        apart = [await answered_by_two(pools, **fields) for fields in kinds]
    wait_idle(pools)
    for request, texts in apart:
        assert await answered_by_one(pools, request) == texts
    wait_idle(pools)


@pytest.mark.parametrize(
    ("victim", "role", "number"),
    [(PREFILL, "front", signal.SIGKILL), (PREFILL, "mover", signal.SIGSTOP), (DECODE, "front", signal.SIGKILL)],
    ids=["prefill worker dies", "link is cut", "decode worker dies"],
)
async def test_no_request_is_lost(pools: Pools, victim: str, role: str, number: signal.Signals) -> None:
    front, pid = pools.pid(victim), pools.pid(victim, role)
    async with running_streams(pools), handed_over(pools, temperature=1.0, seed=5) as (request, answer):
        os.kill(pid, number)
        texts = await answer
    # A worker whose mover is silent ends by itself.
    wait_for(lambda: pools.pid(victim) not in (0, front), within_s=120, what=f"another {victim}")
    wait_idle(pools)
    assert await said(pools, request) == texts
    wait_idle(pools)


async def test_a_client_that_leaves_between_the_phases(pools: Pools) -> None:
    abandoned = handoffs(pools, "abandoned")
    async with running_streams(pools), handed_over(pools) as (_, answer):
        answer.cancel()
        await eventually(lambda: handoffs(pools, "abandoned") > abandoned)
    wait_idle(pools)
