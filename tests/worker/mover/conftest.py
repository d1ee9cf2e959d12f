"""A real mover process between a fake engine and a fake front, which are the test."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest_asyncio

from services.common.blocks import BlockId, join_ids, split_ids
from services.common.transfer.header import BlockFormat
from services.common.transfer.heads import HeadRange
from services.common.transfer.protocol import PeerAddress
from services.worker.engine_messages import PushTarget
from services.worker.ipc import AsyncLink
from services.worker.messages import HolderRun
from services.worker.mover_messages import (
    FromMoverToEngine,
    FromMoverToFront,
    MoverCounters,
    MoverReady,
    NodeFailing,
    PinBlocks,
    PinnedSlots,
    PullBlocks,
    PullCut,
    PullDone,
    PushBlocks,
    PushDone,
    Unpin,
)
from tests.common.transfer.blocks import EPOCH, SECRET, block_format, payload
from tests.support.processes import clean_environment

_ROOT = Path(__file__).parents[3]
BLOCK_BYTES = 192 * 1024
NUM_BLOCKS = 64
_FORMAT = block_format(BLOCK_BYTES)
T = TypeVar("T")


class MoverProcess:
    """Plays engine and front. Slots that hold a block are in `held`; pins are answered from there.

    heads: those of each block that the mover's pool has.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        pool: mmap.mmap,
        block_format: BlockFormat,
        heads: HeadRange,
        engine: Any,
        front: Any,
    ) -> None:
        self.process = process
        self.format = block_format
        self.heads = heads
        self.slot_bytes = heads.count * block_format.head_bytes
        self.pool = memoryview(pool)
        self.engine: AsyncLink[FromMoverToEngine] = engine
        self.front: AsyncLink[FromMoverToFront] = front
        self.held: dict[BlockId, int] = {}
        self.pins: dict[int, int] = {}
        self.answers_pins = True
        self.messages: list[PullDone | PullCut | PushDone | PinBlocks | Unpin] = []
        self.counters: MoverCounters | None = None
        self.failing: list[NodeFailing] = []
        self.arrived = asyncio.Condition()
        self.ready: MoverReady

    @property
    def peer(self) -> PeerAddress:
        """Where others pull from it."""
        return PeerAddress(self.ready.pull_address, self.ready.grpc_address)

    def slot(self, index: int) -> memoryview:
        """Memory of a slot."""
        return self.pool[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def share(self, block: bytes) -> memoryview:
        """The mover's heads of a whole block."""
        return self.heads.share(memoryview(block), self.format.num_kv_heads)

    def fill(self, ids: list[BlockId], first_slot: int = 0) -> list[int]:
        """Put blocks into slots; returns them."""
        slots = list(range(first_slot, first_slot + len(ids)))
        for slot, block_id in zip(slots, ids, strict=True):
            self.slot(slot)[:] = self.share(payload(block_id, self.format.block_bytes))
            self.held[block_id] = slot
        return slots

    def pull(
        self,
        key: int,
        ids: list[BlockId],
        slots: list[int],
        *runs: HolderRun,
        deadline_s: float = 30.0,
        patience_s: float = 0.0,
        block_compute_s: float = 0.0,
    ) -> None:
        race = (patience_s, block_compute_s)
        self.engine.send(PullBlocks(key, "req-1", join_ids(ids), slots, list(runs), deadline_s, "", *race))

    def push(self, key: int, ids: list[BlockId], parents: list[BlockId], slots: list[int], *, starts: bool) -> None:
        self.engine.send(PushBlocks(key, join_ids(ids), join_ids(parents), slots, b"o" * 16, "", starts))

    def target(self, location_id: str, peer: PeerAddress) -> None:
        self.front.send(PushTarget(location_id, 0, peer.pull_address, peer.grpc_address))

    async def done(self, kind: type[T], key: int, timeout_s: float = 60.0) -> T:
        """The one terminal message of an operation."""
        async with asyncio.timeout(timeout_s), self.arrived:
            await self.arrived.wait_for(lambda: self._found(kind, key))
        (found,) = self._found(kind, key)
        return found

    def _found(self, kind: type[T], key: int) -> list[T]:
        return [m for m in self.messages if isinstance(m, kind) and m.key == key]  # type: ignore[attr-defined]

    async def play_engine(self) -> None:
        """Answer pins and remember everything else."""
        while True:
            message = await self.engine.receive()
            async with self.arrived:
                self.messages.append(message)
                self.arrived.notify_all()
            if isinstance(message, PinBlocks) and self.answers_pins:
                slots = []
                for block_id in split_ids(message.ids):
                    if block_id not in self.held:
                        break
                    slots.append(self.held[block_id])
                self.pins[message.key] = len(slots)
                self.engine.send(PinnedSlots(message.key, slots))
            elif isinstance(message, Unpin):
                self.pins.pop(message.key, None)

    async def play_front(self) -> None:
        """Keep the newest counters, and which nodes fail."""
        while True:
            message = await self.front.receive()
            if isinstance(message, MoverCounters):
                self.counters = message
            elif isinstance(message, NodeFailing):
                self.failing.append(message)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(30)


StartMover = Callable[..., Awaitable[MoverProcess]]


@pytest_asyncio.fixture
async def start_mover() -> AsyncIterator[StartMover]:
    """Starts movers that end with the test."""
    started: list[tuple[MoverProcess, list[asyncio.Task[None]]]] = []

    async def start(transport: str, expected: BlockFormat = _FORMAT, heads: HeadRange | None = None) -> MoverProcess:
        mover = await _start(transport, expected, heads or expected.all_heads)
        tasks = [asyncio.ensure_future(mover.play_engine()), asyncio.ensure_future(mover.play_front())]
        started.append((mover, tasks))
        return mover

    yield start
    for mover, tasks in started:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(mover.engine.close(), mover.front.close(), return_exceptions=True)
        mover.end()


async def _start(transport: str, expected: BlockFormat, heads: HeadRange) -> MoverProcess:
    pool_bytes = NUM_BLOCKS * heads.count * expected.head_bytes
    descriptor = os.memfd_create("pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, pool_bytes)
    # As the engine does: mapped before the mover starts, which then lets nobody else write.
    pool = mmap.mmap(descriptor, pool_bytes)
    (engine, engine_theirs), (front, front_theirs) = socket.socketpair(), socket.socketpair()
    config = {
        "engine_fd": engine_theirs.fileno(),
        "front_fd": front_theirs.fileno(),
        "pool_fd": descriptor,
        "num_blocks": NUM_BLOCKS,
        "block_bytes": expected.block_bytes,
        "num_kv_heads": expected.num_kv_heads,
        "listen_host": "127.0.0.1",
        "worker_id": "w-1",
        "epoch": EPOCH,
        "model_digest_hex": expected.model_digest.hex(),
        "parent_pid": os.getpid(),
        "layout_version": 1,
        "kv_dtype": expected.kv_dtype,
        "first_head": heads.first,
        "num_heads": heads.count,
        "block_shape": list(expected.segments[0].shape),
        "transport": transport,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "services.worker.mover", "--config", json.dumps(config)],
        cwd=_ROOT,
        env=clean_environment(KVMESH_MESH_SECRET=SECRET),
        pass_fds=(engine_theirs.fileno(), front_theirs.fileno(), descriptor),
    )
    os.close(descriptor)
    engine_theirs.close()
    front_theirs.close()
    engine_link: AsyncLink[FromMoverToEngine] = await AsyncLink.open(engine, FromMoverToEngine)
    front_link: AsyncLink[FromMoverToFront] = await AsyncLink.open(front, FromMoverToFront)
    mover = MoverProcess(process, pool, expected, heads, engine_link, front_link)
    try:
        async with asyncio.timeout(60):
            ready = await mover.front.receive()
    except BaseException:
        mover.end()
        raise
    assert isinstance(ready, MoverReady)
    mover.ready = ready
    return mover
