"""A worker of several ranks in a real mesh: one replica to everybody, withdrawn at once when one of its ranks goes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator

import pytest

from bench.tiny_model import write_tiny_model
from tests.faults.test_kills import Stream, events
from tests.support.mesh import Mesh, running_mesh, total, wait_for

BACK_WITHIN_S = 240.0
STREAMS, TOKENS = 4, 400
# A busy machine may let all streams end before the rank does; of so many deaths one is in their midst.
DEATHS = 4


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    model = write_tiny_model(tmp_path_factory.mktemp("model"))
    options = ("--workers", "2", "--kvstores", "0", "--model", f"tiny={model}", "--tensor-parallel", "2")
    with running_mesh(tmp_path_factory.mktemp("mesh"), *options, env={"KVMESH_WORKER_NUM_BLOCKS": "1024"}) as running:
        yield running


def children(mesh: Mesh, worker: str) -> dict[str, int]:
    """Process ids by role."""
    return {child["role"]: child["pid"] for child in mesh.process(worker)["children"]}


async def stream(mesh: Mesh, number: int, seen: Stream) -> None:
    body = {
        "model": "tiny", "prompt": f"Story number {number}:", "max_tokens": TOKENS, "ignore_eos": True,
        "temperature": float(number % 2), "seed": number,
    }  # fmt: skip
    async with asyncio.timeout(180):
        async for headers, data in events(mesh, body):
            seen.worker = headers["x-kvmesh-worker"]
            if data == "[DONE]":
                seen.done = True
            elif "error" in (event := json.loads(data)):
                seen.error = event["error"]["message"]
            else:
                seen.text += event["choices"][0]["text"]
                seen.started.set()


async def run_streams(mesh: Mesh, ranks: dict[str, int] | None = None) -> list[Stream]:
    """What all streams saw. ranks: a process of each worker; that of the first stream is killed once all have begun."""
    seen = [Stream() for _ in range(STREAMS)]
    async with asyncio.TaskGroup() as group:
        for number, one in enumerate(seen):
            group.create_task(stream(mesh, number, one))
        if ranks is not None:
            async with asyncio.timeout(120):
                await asyncio.gather(*(one.started.wait() for one in seen))
            os.kill(ranks[seen[0].worker], signal.SIGKILL)
    return seen


def wait_replaced(mesh: Mesh, worker: str, before: dict[str, int]) -> None:
    """Until none of these processes is left, and everything is ready again."""

    def replaced() -> bool:
        now = children(mesh, worker)
        return now.keys() == before.keys() and not set(now.values()) & set(before.values())

    wait_for(replaced, within_s=BACK_WITHIN_S, what=f"all of {worker} started again")
    mesh.wait_ready()


async def test_a_dead_rank_is_not_noticed(mesh: Mesh) -> None:
    mesh.wait_ready()
    assert list(children(mesh, "worker-0")) == ["engine", "rank1", "mover"]
    undisturbed = await run_streams(mesh)
    assert all(one.done and len(one.text) > TOKENS for one in undisturbed)
    for _ in range(DEATHS):
        before = {name: children(mesh, name) for name in ("worker-0", "worker-1")}
        seen = await run_streams(mesh, {name: pids["rank1"] for name, pids in before.items()})
        assert [one.error for one in seen] == [""] * STREAMS
        assert [one.text for one in seen] == [one.text for one in undisturbed]
        victim = seen[0].worker
        await asyncio.to_thread(wait_replaced, mesh, victim, before[victim])
        if total(mesh.metrics("gateway-0"), "kvmesh_gateway_rescues_total"):
            return
    pytest.fail(f"no stream was rescued after {DEATHS} deaths")


def test_a_stopped_rank_ends_its_replica(mesh: Mesh) -> None:
    """Also while nothing is computed."""
    mesh.wait_ready()
    before = children(mesh, "worker-1")
    os.kill(before["rank1"], signal.SIGSTOP)
    wait_replaced(mesh, "worker-1", before)
