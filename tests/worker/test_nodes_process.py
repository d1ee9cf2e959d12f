"""A real worker among real kvstore nodes that join, leave cleanly, are killed and come back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path

from kvmesh.v1 import kvstore_pb2, kvstore_pb2_grpc

from services.common.redis_client import connect_redis
from services.common.registry import LocationRecord, read_registry
from services.common.rpc import open_channel
from services.worker.push_target import PushTargets
from tests.support.log_lines import log_events
from tests.support.mesh import total
from tests.support.processes import clean_environment
from tests.support.valkey import Valkey
from tests.support.waiting import eventually, eventually_async
from tests.worker.replica import SECRET, WorkerProcess, running_worker
from tests.worker.test_process import prompt

RAMP_S = 4.0
# Of each request that `computing` sends.
REQUEST_BLOCKS = 3
HOST = "127.0.0.1"


class Node:
    """A kvstore process under a name that it keeps over restarts."""

    def __init__(self, folder: Path, redis_url: str, name: str) -> None:
        self.name = name
        self._ready = folder / f"{name}.ready.json"
        self._command = [sys.executable, "-m", "services.kvstore", "--redis-url", redis_url, "--instance", name]
        self._command += ["--ready-file", str(self._ready), "--drain-deadline-s", "5"]
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        self._ready.unlink(missing_ok=True)
        self.process = subprocess.Popen(self._command, env=clean_environment(KVMESH_MESH_SECRET=SECRET))
        await eventually(self._ready.exists)

    async def stop(self, number: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return await asyncio.to_thread(self.process.wait, 20)

    async def blocks(self, worker: WorkerProcess) -> int:
        async with open_channel(json.loads(self._ready.read_text())["address"]) as channel:
            stub = kvstore_pb2_grpc.KvStoreStub(channel)
            answer = await stub.Stats(kvstore_pb2.StatsRequest(), timeout=30, metadata=worker.metadata())
        return int(answer.ram_blocks)

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)


@contextlib.asynccontextmanager
async def two_nodes(folder: Path, redis_url: str) -> AsyncIterator[tuple[Node, Node]]:
    """The first one runs."""
    nodes = Node(folder, redis_url, "kv-a"), Node(folder, redis_url, "kv-b")
    try:
        await nodes[0].start()
        yield nodes
    finally:
        for node in nodes:
            node.end()


def worker_that_prefers(name: str, *, only_after_s: float) -> str:
    """A worker that goes to node `name` once it is grown, and not before it has that age."""
    now_s = 1_000_000.0

    def record(node: str, age_s: float) -> LocationRecord:
        started_s = int(now_s - age_s)
        return LocationRecord(kind="kvstore", id=node, epoch=1, host=HOST, grpc_address="a:1", started_s=started_s)

    def chosen(worker: str, age_s: float) -> str:
        targets = PushTargets(worker_id=worker, host=HOST, ramp_s=RAMP_S)
        return targets.choose([record("kv-a", 100), record("kv-b", age_s)], now_s).location_id

    return next(
        worker
        for worker in (f"w{i}" for i in range(1000))
        if chosen(worker, RAMP_S) == name and chosen(worker, only_after_s) != name
    )


def targets_of(worker: WorkerProcess) -> list[str]:
    """Nodes that the worker turned to, one after another."""
    lines = log_events(worker.log())
    return [line["kvstore_id"] for line in lines if line["event"] == "push target" and line.get("role") != "mover"]


async def age_when_chosen(worker: WorkerProcess, redis_url: str, name: str) -> float:
    """How old node `name` was when the worker turned to it, seconds."""
    client = connect_redis(redis_url)
    (started_s,) = [one.started_s for one in await read_registry(client) if one.id == name]
    await client.aclose()
    chosen = [line for line in log_events(worker.log(), '"push target"') if line.get("kvstore_id") == name]
    return datetime.fromisoformat(chosen[-1]["timestamp"]).timestamp() - started_s


async def turns_to(worker: WorkerProcess, name: str, count: int) -> float:
    """Wait for the worker's `count`-th choice, which is `name`; seconds that took."""
    started_s = time.monotonic()
    await eventually(lambda: len(targets_of(worker)) >= count, every_s=0.02)
    assert targets_of(worker)[count - 1] == name, worker.log()
    return time.monotonic() - started_s


async def test_nodes_join_leave_die_and_come_back(tmp_path: Path, valkey: Valkey) -> None:
    name = worker_that_prefers("kv-b", only_after_s=2.5)
    flags = ("--instance", name, "--node-ramp-s", str(RAMP_S), "--num-blocks", "512")
    async with (
        two_nodes(tmp_path, valkey.url) as (first, second),
        running_worker(tmp_path / "w", valkey.url, *flags, threads=1) as worker,
    ):
        await turns_to(worker, "kv-a", len(targets_of(worker)) or 1)
        count = len(targets_of(worker))
        tokens = prompt(200)
        before = await worker.generate(tokens, 8)
        await eventually_async(lambda: _has(first, worker, 12))

        # A node joins: it is turned to when it has grown, and gets the whole chain of what is computed next.
        await second.start()
        count += 1
        await turns_to(worker, "kv-b", count)
        assert await age_when_chosen(worker, valkey.url, "kv-b") > 1.0, "not everybody's at once"
        longer = [*tokens, *prompt(60, 7)]
        await worker.generate(longer, 8)
        await eventually_async(lambda: _has_grown(second, worker, longer))

        # It leaves cleanly, under load: others know while it still answers, and what is lost was in flight.
        dropped = _total(worker, "dropped_pushes")
        async with computing(worker):
            pushed = _total(worker, "pushed_blocks")
            await eventually(lambda: _total(worker, "pushed_blocks") > pushed, every_s=0.05)
            stopping = asyncio.create_task(second.stop(signal.SIGTERM))
            count += 1
            await turns_to(worker, "kv-a", count)
            assert await stopping == 0
            pushed = _total(worker, "pushed_blocks")
            await eventually(lambda: _total(worker, "pushed_blocks") > pushed + 4, every_s=0.05)
        assert _total(worker, "dropped_pushes") - dropped <= REQUEST_BLOCKS
        assert "a kvstore node is left" not in worker.log(), "nobody had to find out that it is gone"

        # It comes back under another epoch and grows again; then it is killed, and left before its lease ends.
        await second.start()
        count += 1
        await turns_to(worker, "kv-b", count)
        await second.stop(signal.SIGKILL)
        dropped = _total(worker, "dropped_pushes")
        async with computing(worker):
            count += 1
            took_s = await turns_to(worker, "kv-a", count)
        # For its failures, before its lease ended.
        assert "a kvstore node is left" in worker.log()
        await eventually(lambda: _total(worker, "dropped_pushes") > dropped, every_s=0.05)
        print(f"a killed node was left after {took_s:.1f} s")

        # Nothing of all that changes what is generated.
        again = await worker.generate(tokens, 8)
        assert again.tokens == before.tokens
        await worker.wait_idle()
        assert worker.log().count("Traceback") == 0


async def test_a_stopped_node_is_left_and_taken_back_when_it_shows_life(tmp_path: Path, valkey: Valkey) -> None:
    flags = ("--node-ramp-s", "0", "--num-blocks", "512")
    async with (
        two_nodes(tmp_path, valkey.url) as (first, _),
        running_worker(tmp_path / "w", valkey.url, *flags, threads=1) as worker,
    ):
        await turns_to(worker, "kv-a", len(targets_of(worker)) or 1)
        count = len(targets_of(worker))
        assert first.process is not None
        first.process.send_signal(signal.SIGSTOP)
        async with computing(worker):
            try:
                await turns_to(worker, "", count + 1)
            finally:
                first.process.send_signal(signal.SIGCONT)
            await turns_to(worker, "kv-a", count + 2)
        assert "a kvstore node is back" in worker.log()
        await worker.generate(prompt(100, 55), 2)
        await eventually_async(lambda: _has(first, worker, 6))
        await worker.wait_idle()


async def _has(node: Node, worker: WorkerProcess, blocks: int) -> bool:
    return await node.blocks(worker) >= blocks


async def _has_grown(node: Node, worker: WorkerProcess, tokens: list[int]) -> bool:
    """Ask on until the node has the whole chain: what the pool held before comes at a bounded rate."""
    await worker.generate([*tokens, *prompt(32, int(time.monotonic() * 1000) % 10_000)], 2)
    return await node.blocks(worker) >= len(tokens) // 16


@contextlib.asynccontextmanager
async def computing(worker: WorkerProcess) -> AsyncIterator[None]:
    """One request after another, each of blocks that are new, while the body runs."""

    async def keep_on() -> None:
        for number in itertools.count(1000):
            await worker.generate(prompt(16 * REQUEST_BLOCKS + 1, number), 2)

    task = asyncio.create_task(keep_on())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _total(worker: WorkerProcess, counter: str) -> float:
    """A counter of the mover, as of its last report."""
    return total(worker.metrics(), f"kvmesh_mover_{counter}_total")
