"""Blocks between real processes: a worker pulls back from a kvstore node what it evicted, and from another worker."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from kvmesh.v1 import common_pb2

from services.common.redis_client import connect_redis
from services.common.registry import LocationRecord, RegistryWatcher
from tests.support.mesh import total
from tests.support.processes import clean_environment
from tests.support.valkey import Valkey
from tests.support.waiting import eventually
from tests.worker.replica import SECRET, running_worker
from tests.worker.test_process import prompt


@contextlib.asynccontextmanager
async def running_kvstore(redis_url: str) -> AsyncIterator[None]:
    """A kvstore node that ends with the context."""
    process = subprocess.Popen(
        [sys.executable, "-m", "services.kvstore", "--redis-url", redis_url, "--instance", "kv"],
        env=clean_environment(KVMESH_MESH_SECRET=SECRET),
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)


@contextlib.asynccontextmanager
async def registry(redis_url: str) -> AsyncIterator[RegistryWatcher]:
    """The registry, followed."""
    client = connect_redis(redis_url)
    watcher = RegistryWatcher(client)
    task = asyncio.create_task(watcher.run())
    try:
        yield watcher
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.aclose()


def pull_step(record: LocationRecord, num_blocks: int) -> common_pb2.PullStep:
    """A plan of the first blocks of a prompt from one holder."""
    kinds = {"worker": common_pb2.LOCATION_KIND_WORKER, "kvstore": common_pb2.LOCATION_KIND_KVSTORE}
    return common_pb2.PullStep(
        kind=kinds[record.kind],
        location_id=record.id,
        epoch=record.epoch,
        pull_address=record.pull_address,
        grpc_address=record.transfer_grpc_address or record.grpc_address,
        first_block=0,
        num_blocks=num_blocks,
    )


async def test_evicted_blocks_come_back_and_peers_share(tmp_path: Path, valkey: Valkey) -> None:
    tokens = prompt(100)
    async with (
        running_kvstore(valkey.url),
        registry(valkey.url) as watcher,
        running_worker(tmp_path / "a", valkey.url, "--num-blocks", "24", threads=1) as worker,
    ):
        await eventually(lambda: {"kvstore/kv", "worker/w"} <= watcher.records.keys())
        await eventually(lambda: '"push target"' in worker.log())
        cold = await worker.generate(tokens, 10)
        await eventually(lambda: total(worker.metrics(), "kvmesh_mover_pushed_blocks_total") >= 6)
        for other in range(1, 6):
            await worker.generate(prompt(120, 100 + other), 2)
        step = pull_step(watcher.records["kvstore/kv"], 6)
        back = await worker.generate(tokens, 10, pull_plan=[step])
        assert back.completed is not None
        assert back.completed.usage.cached.ram == 96, worker.log()
        assert back.completed.pull_s > 0
        assert back.tokens == cold.tokens

        async with running_worker(tmp_path / "b", valkey.url, "--instance", "b", threads=1) as peer:
            step = pull_step(watcher.records["worker/w"], 6)
            shared = await peer.generate(tokens, 10, pull_plan=[step])
            assert shared.completed is not None
            assert shared.completed.usage.cached.peer == 96, peer.log()
            assert shared.tokens == cold.tokens
            # A holder that is not what the plan says: computed here.
            step.epoch += 1
            alone = await peer.generate(prompt(90, 200), 5, pull_plan=[step])
            assert alone.cached == 0
            await peer.wait_idle()
        await worker.wait_idle()


async def test_blocks_that_are_about_to_go_are_pushed_in_time(tmp_path: Path, valkey: Valkey) -> None:
    tokens = prompt(100)
    options = ("--num-blocks", "96", "--push", "on_eviction")
    async with (
        running_kvstore(valkey.url),
        registry(valkey.url) as watcher,
        running_worker(tmp_path / "a", valkey.url, *options, threads=1) as worker,
    ):
        await eventually(lambda: {"kvstore/kv", "worker/w"} <= watcher.records.keys())
        await eventually(lambda: '"push target"' in worker.log())
        cold = await worker.generate(tokens, 10)
        for other in range(6):
            await worker.generate(prompt(120, 100 + other), 2)
        assert total(worker.metrics(), "kvmesh_mover_pushed_blocks_total") == 0
        for other in range(6, 18):
            await worker.generate(prompt(120, 100 + other), 8)
        assert total(worker.metrics(), "kvmesh_worker_pushes_dropped_total") == 0
        step = pull_step(watcher.records["kvstore/kv"], 6)
        back = await worker.generate(tokens, 10, pull_plan=[step])
        assert back.completed is not None
        assert back.completed.usage.cached.ram == 96, worker.log()
        assert back.tokens == cold.tokens
        await worker.wait_idle()


async def test_blocks_of_a_pool_that_is_not_shared_travel_through_staging(tmp_path: Path, valkey: Valkey) -> None:
    tokens = prompt(100)
    # A block of the model is 360 KiB: 24 slots, of which pulls may have 18, pushes and serving 12 each.
    staged = ("--staging-bytes", str(24 * 368_640))
    async with (
        running_kvstore(valkey.url),
        registry(valkey.url) as watcher,
        running_worker(tmp_path / "a", valkey.url, "--num-blocks", "24", *staged, threads=1) as worker,
    ):
        await eventually(lambda: {"kvstore/kv", "worker/w"} <= watcher.records.keys())
        await eventually(lambda: '"push target"' in worker.log())
        cold = await worker.generate(tokens, 10)
        await eventually(lambda: total(worker.metrics(), "kvmesh_mover_pushed_blocks_total") >= 6)
        for other in range(1, 6):
            await worker.generate(prompt(120, 100 + other), 2)
        back = await worker.generate(tokens, 10, pull_plan=[pull_step(watcher.records["kvstore/kv"], 6)])
        assert back.completed is not None
        assert back.completed.usage.cached.ram == 96, worker.log()
        assert back.tokens == cold.tokens
        # From a worker with staging to one whose pool is shared, and on to one with staging.
        async with running_worker(tmp_path / "b", valkey.url, "--instance", "b", threads=1) as peer:
            shared = await peer.generate(tokens, 10, pull_plan=[pull_step(watcher.records["worker/w"], 6)])
            assert shared.completed is not None
            assert shared.completed.usage.cached.peer == 96, peer.log()
            assert shared.tokens == cold.tokens
            for other in range(11, 16):
                await worker.generate(prompt(120, 100 + other), 2)
            again = await worker.generate(tokens, 10, pull_plan=[pull_step(watcher.records["worker/b"], 6)])
            assert again.completed is not None
            assert again.completed.usage.cached.peer == 96, worker.log()
            assert again.tokens == cold.tokens
        await worker.wait_idle()
        assert total(worker.metrics(), "kvmesh_worker_staging_short_blocks_total") == 0
