"""Blocks and running attempts between real workers and a kvstore node of the old and of this release.

The workers share memory with each other; the node is reached over UCX, and once over gRPC. Its SSD is written and read
by both releases.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from operator import gt
from pathlib import Path

import pytest
from kvmesh.v1 import common_pb2, worker_pb2

from services.common.registry import RegistryWatcher
from tests.support.mesh import total
from tests.support.processes import clean_environment
from tests.support.valkey import Valkey
from tests.support.waiting import eventually
from tests.versions.releases import Releases, old_tree
from tests.worker.replica import SECRET, WorkerProcess, running_worker
from tests.worker.test_process import prompt
from tests.worker.test_serve import Stream
from tests.worker.test_transfers_process import pull_step, registry

# Of a prompt of 100 tokens and its answer. On a busy machine a transfer may be given up, so there are several.
BLOCKS, PUSHED_PROMPTS, TRIES, PUSH_WITHIN_S = 6, 3, 12, 10.0
SAMPLING = common_pb2.SamplingParams(temperature=1.0, seed=3, frequency_penalty=0.2)

# By the number of the prompt.
Answers = dict[int, list[int]]


@dataclass
class Scene:
    """Worker "old" and worker "new", and where a kvstore node keeps its blocks while it changes its release."""

    folder: Path
    valkey: Valkey
    releases: Releases
    watcher: RegistryWatcher
    old: WorkerProcess
    new: WorkerProcess

    @contextlib.asynccontextmanager
    async def node(self, *, is_old: bool, transport: str) -> AsyncIterator[None]:
        """A node of either release on the same SSD; what it holds is there when it has ended."""
        self.releases.to_old(("old", "kv") if is_old else ("old",))
        before, targets = self.watcher.records.get("kvstore/kv"), self._targets()
        ssd = ("--ssd-path", str(self.folder / "ssd"), "--ssd-bytes", str(64 * 2**20))
        command = (sys.executable, "-m", "services.kvstore", "--redis-url", self.valkey.url, "--instance", "kv")
        environment = clean_environment(KVMESH_MESH_SECRET=SECRET, **self.releases.env)
        process = subprocess.Popen([*command, "--transport", transport, *ssd], env=environment)
        try:
            await eventually(lambda: self.watcher.records.get("kvstore/kv") not in (None, before), timeout_s=60)
            assert bool(self.watcher.records["kvstore/kv"].release) != is_old
            await eventually(lambda: all(map(gt, self._targets(), targets)), timeout_s=60)
            yield
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 60) == 0
        finally:
            process.kill()
            process.wait(30)

    def _targets(self) -> list[int]:
        """How often each worker has found a node for its blocks."""
        return [worker.log().count('"push target"') for worker in (self.old, self.new)]

    async def computed(self, worker: WorkerProcess, name: int) -> Answers:
        """What a worker says to prompts of its own, once the node has the blocks of some: pushes may be given up."""
        before, answers = self._pushed(worker), Answers()

        def pushed() -> float:
            return (self._pushed(worker) - before) / BLOCKS

        for number in range(100 * name, 100 * name + TRIES):
            answers[number] = (await worker.generate(prompt(100, number), 10)).tokens[0]
            with contextlib.suppress(TimeoutError):
                await eventually(lambda: pushed() >= min(len(answers), PUSHED_PROMPTS), timeout_s=PUSH_WITHIN_S)
                if len(answers) >= PUSHED_PROMPTS:
                    return answers
        raise AssertionError(f"too little was pushed: {worker.log()[-4000:]}")

    async def pulled(self, worker: WorkerProcess, holder: str, answers: Answers) -> None:
        """The worker answers as whoever computed the blocks, and with those of `holder`, but for pulls given up."""
        step, pulled = pull_step(self.watcher.records[holder], BLOCKS), 0
        for number, tokens in answers.items():
            answer = await worker.generate(prompt(100, number), 10, pull_plan=[step])
            assert answer.tokens[0] == tokens
            assert answer.completed is not None
            cached = answer.completed.usage.cached
            assert cached.local == 0
            pulled += cached.peer + cached.ram + cached.ssd
        assert pulled >= 16 * BLOCKS, worker.log()[-4000:]

    def _pushed(self, worker: WorkerProcess) -> float:
        return total(worker.metrics(), "kvmesh_mover_pushed_blocks_total")


@contextlib.asynccontextmanager
async def scene(folder: Path, valkey: Valkey) -> AsyncIterator[Scene]:
    (folder / "tree").mkdir()
    releases = Releases(folder, old_tree(folder / "tree"))
    releases.to_old(["old"])
    async with AsyncExitStack() as stack:
        watcher = await stack.enter_async_context(registry(valkey.url))

        async def worker(name: str) -> WorkerProcess:
            running = running_worker(folder / name, valkey.url, "--instance", name, threads=1, env=releases.env)
            return await stack.enter_async_context(running)

        old, new = await worker("old"), await worker("new")
        await eventually(lambda: {"worker/old", "worker/new"} <= watcher.records.keys(), timeout_s=60)
        assert [bool(watcher.records[f"worker/{name}"].release) for name in ("old", "new")] == [False, True]
        yield Scene(folder, valkey, releases, watcher, old, new)


@pytest.mark.long
async def test_blocks_and_attempts_go_from_release_to_release(tmp_path: Path, valkey: Valkey) -> None:
    async with scene(tmp_path, valkey) as here:
        old, new = here.old, here.new
        assert old.identity.model_digest == new.identity.model_digest
        async with here.node(is_old=True, transport="ucx"):
            by_old, by_new = await here.computed(old, 1), await here.computed(new, 2)
            await here.pulled(new, "worker/old", by_old)
            await here.pulled(old, "worker/new", by_new)
            by_old, by_new = await here.computed(old, 3), await here.computed(new, 4)
        async with here.node(is_old=False, transport="ucx"):
            await here.pulled(new, "kvstore/kv", by_old)
            await here.pulled(old, "kvstore/kv", by_new)
            by_old, by_new = await here.computed(old, 5), await here.computed(new, 6)
        async with here.node(is_old=True, transport="grpc"):
            await here.pulled(new, "kvstore/kv", by_old)
            await here.pulled(old, "kvstore/kv", by_new)
        await _moves(here, old, new, 7)
        await _moves(here, new, old, 8)
        for worker in (old, new):
            await worker.wait_idle()
            assert total(worker.metrics(), "kvmesh_mover_verification_failures_total") == 0


async def _moves(here: Scene, source_worker: WorkerProcess, target_worker: WorkerProcess, number: int) -> None:
    """A running attempt goes on at the other worker, with the tokens of one that stays."""
    tokens, count = prompt(150, number), 120
    whole = await source_worker.generate(tokens, count, sampling=SAMPLING, block_root=b"", prompt_block_ids=b"")
    source, target = Stream(source_worker), Stream(target_worker)
    await source.start(1, tokens, count, sampling=SAMPLING)
    await source.read_until(lambda: len(source.tokens(1)) >= 20, within_s=60)
    known = source.tokens(1)
    holder = "worker/old" if source_worker is here.old else "worker/new"
    plan = [pull_step(here.watcher.records[holder], (len(tokens) + len(known)) // 16)]
    outputs = [worker_pb2.KnownOutput(token_ids=known)]
    await target.start(1, tokens, count, sampling=SAMPLING, known=outputs, hold_s=60.0, pull_plan=plan)
    await target.read_until(lambda: any(one.HasField("prepared") for one in target.events.get(1, [])), within_s=60)
    await source.cancel(1)
    await target.resume(1, {})
    await target.read_until(lambda: 1 in target.ends, within_s=60)
    assert known + target.tokens(1) == whole.tokens[0]
