"""This worker's blocks for others, pinned by the engine while they are read. It keeps nobody else's blocks.

A rank serves what pullers ask for of the heads that it owns, and nothing of a block of which they want others too.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from services.common.blocks import join_ids
from services.common.transfer.header import UNKNOWN_PARENT, BlockFormat, make_header
from services.common.transfer.heads import HeadRange
from services.common.transfer.protocol import (
    STOP_COMPLETE,
    STOP_EPOCH,
    STOP_HEADS,
    STOP_MISSING,
    STOP_OVERLOAD,
    HeldBlock,
    PullRequest,
)
from services.worker.mover.counters import Counters
from services.worker.mover.pool import INLINE_BYTES, SharedPool
from services.worker.mover_messages import PinBlocks, PinnedSlots, Unpin

# The engine answers between two steps, which take 250 ms at most.
PIN_TIMEOUT_S = 2.0
MAX_PINS = 256
# A pull that waits may come before the request that computes its blocks.
_GRACE_S = 1.0
_LOOK_AGAIN_S = 0.05
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class SourceStatistics:
    """Blocks that the engine holds, or may hold, for remote pulls; and questions to it without an answer yet."""

    num_leases: int
    num_waiting: int


class PinnedSource:
    """BlockSource over the engine's pool."""

    def __init__(
        self,
        pool: SharedPool,
        block_format: BlockFormat,
        heads: HeadRange,
        epoch: int,
        counters: Counters,
        send: Callable[[PinBlocks | Unpin], None],
    ) -> None:
        self._pool = pool
        self._format = block_format
        self._heads = heads
        self._epoch = epoch
        self._counters = counters
        self._send = send
        self._keys = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[list[int]]] = {}
        # Pins that the engine holds, or may hold, for us.
        self._num_pins = 0

    def statistics(self) -> SourceStatistics:
        """A snapshot."""
        return SourceStatistics(self._num_pins, len(self._waiting))

    def pinned(self, message: PinnedSlots) -> None:
        """The engine's answer. One that nobody waits for any more was unpinned already."""
        future = self._waiting.pop(message.key, None)
        if future is not None and not future.done():
            future.set_result(message.slots)

    async def lease(self, request: PullRequest) -> PinnedLease:
        """The leading blocks that the engine has; none for another epoch or for heads of other ranks.

        With wait_s, once it has the first: as long as it computes that, and for a moment while it does not yet.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + min(_GRACE_S, request.wait_s)
        while True:
            lease = await self._lease(request)
            if lease.blocks or lease.stop != STOP_MISSING or loop.time() >= until_s:
                return lease
            lease.release(0, "")
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _lease(self, request: PullRequest) -> PinnedLease:
        if request.epoch not in (0, self._epoch):
            return _nothing(STOP_EPOCH)
        wanted = request.heads or self._format.all_heads
        if not self._heads.contains(wanted):
            return _nothing(STOP_HEADS)
        if self._num_pins >= MAX_PINS:
            return _nothing(STOP_OVERLOAD)
        key = next(self._keys)
        self._num_pins += 1
        try:
            slots = await self._pin(key, request)
            blocks = await self._read(request, slots, wanted)
        except TimeoutError:
            self._unpin(key)
            level = logging.INFO if request.wait_s else logging.WARNING
            _log.log(level, "the engine did not pin blocks in time", blocks=len(request.ids), wait_s=request.wait_s)
            return _nothing(STOP_MISSING if request.wait_s else STOP_OVERLOAD)
        except BaseException:
            self._unpin(key)
            raise
        stop = STOP_COMPLETE if len(blocks) == len(request.ids) else STOP_MISSING

        def released(num_sent: int) -> None:
            self._counters.served_blocks += num_sent
            self._unpin(key)

        return PinnedLease(blocks, stop, released)

    async def _pin(self, key: int, request: PullRequest) -> list[int]:
        future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        self._send(PinBlocks(key, join_ids(request.ids), may_wait=request.wait_s > 0))
        try:
            async with asyncio.timeout(min(request.wait_s or PIN_TIMEOUT_S, request.deadline_s)):
                return await future
        finally:
            self._waiting.pop(key, None)

    async def _read(self, request: PullRequest, slots: Sequence[int], wanted: HeadRange) -> list[HeldBlock]:
        parents = [UNKNOWN_PARENT, *request.ids]
        inner, num_heads = wanted.relative_to(self._heads), self._heads.count

        def read() -> list[HeldBlock]:
            payloads = [inner.share(self._pool.slot(slot), num_heads) for slot in slots]
            return [
                HeldBlock(make_header(self._format, block_id, payload, parent_id=parent, heads=wanted), payload, "peer")
                for block_id, parent, payload in zip(request.ids, parents, payloads, strict=False)
            ]

        if len(slots) * wanted.count * self._format.head_bytes <= INLINE_BYTES:
            return read()
        return await asyncio.to_thread(read)

    def _unpin(self, key: int) -> None:
        self._num_pins -= 1
        self._send(Unpin(key))


class PinnedLease:
    """Blocks that the engine has pinned for one remote pull."""

    def __init__(self, blocks: list[HeldBlock], stop: str, released: Callable[[int], None]) -> None:
        self.blocks = blocks
        self.stop = stop
        self._released = released

    def release(self, num_sent: int, stop: str) -> None:
        """As `BlockLease.release`."""
        if stop and stop != STOP_MISSING:
            _log.info("a served pull stopped short", sent_blocks=num_sent, stop=stop)
        self._released(num_sent)


def _nothing(stop: str) -> PinnedLease:
    return PinnedLease([], stop, lambda _: None)


class NoReservation:
    """Nothing is kept."""

    num_held = 0
    buffers: Sequence[memoryview] = ()

    async def commit(self) -> int:
        """None are held."""
        return 0

    def abandon(self) -> None:
        """Nothing to give back."""


class RefusingSink:
    """BlockSink of a process that keeps nobody's blocks."""

    async def reserve(self, headers: Sequence[bytes], epoch: int) -> NoReservation:
        """No room."""
        return NoReservation()
