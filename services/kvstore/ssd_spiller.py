"""Writes blocks of the RAM tier to the SSD behind the requests, in frames, in the order they came.

A block that is written already costs nothing when RAM evicts it; one that is evicted first is dropped and counted.
What waits is in RAM, so the queue is bounded by it. Ancestors that are not on the SSD are written before their
descendants.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

from services.common.blocks import BlockId
from services.kvstore.ram_tier import SMALL_FRACTION, Entry, RamTier
from services.kvstore.ssd_format import MAX_FRAME_RECORDS
from services.kvstore.ssd_frames import frame_share
from services.kvstore.ssd_log import NewBlock
from services.kvstore.ssd_quota import Spill
from services.kvstore.ssd_tier import SsdTier

# A short queue waits this long for more, so that few blocks do not cost a frame each.
_GATHER_S = 0.02
# Share of RAM that may wait to be written: half of what newcomers have before they go.
_LAG = SMALL_FRACTION / 2


@dataclass(frozen=True, slots=True)
class SpillerStatistics:
    """Blocks that wait to be written."""

    num_queued: int


class SsdSpiller:
    """`offer` and `evicted` are synchronous; `run` writes until cancelled."""

    def __init__(self, ram: RamTier, ssd: SsdTier) -> None:
        self._ram = ram
        self._ssd = ssd
        self._queue: dict[BlockId, None] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._progress = asyncio.Event()

    def statistics(self) -> SpillerStatistics:
        """A snapshot."""
        return SpillerStatistics(len(self._queue))

    def offer(self, ids: Iterable[BlockId]) -> None:
        """Blocks that are in RAM, parents first; what is on the SSD already is left out."""
        if not self._ssd.is_on:
            return
        self._queue.update(dict.fromkeys(block_id for block_id in ids if block_id not in self._ssd))
        if self._queue:
            self._idle.clear()
            self._wake.set()

    def evicted(self, block_id: BlockId) -> None:
        """RAM has given this block up."""
        if self.withdraw(block_id):
            self._ssd.totals.dropped(1)

    def withdraw(self, block_id: BlockId) -> bool:
        """A block is not to be written any more; whether it waited."""
        if block_id not in self._queue:
            return False
        del self._queue[block_id]
        return True

    async def caught_up(self, timeout_s: float) -> None:
        """Wait for the disk, at most this long, while so much of a full RAM tier is unwritten that it would be lost."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._ram.is_nearly_full and len(self._queue) > _LAG * len(self._ram):
                    self._progress.clear()
                    await self._progress.wait()

    async def flushed(self) -> None:
        """Wait until nothing is queued."""
        await self._idle.wait()

    async def run(self) -> None:
        """Write until cancelled or the tier is off."""
        while self._ssd.is_on:
            if not self._queue:
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
                await asyncio.sleep(_GATHER_S)
            await self._write_frame()
        self._queue.clear()
        self._idle.set()
        self._progress.set()

    async def _write_frame(self) -> None:
        entries, cut = self._take()
        stored = 0
        try:
            if entries:
                stored = await self._ssd.write([self._spill(entry) for entry in entries])
        finally:
            for entry in entries:
                self._ram.unpin(entry)
        self._progress.set()
        self._ssd.totals.dropped(len(entries) - stored)
        if stored:
            self.offer(block_id for block_id in cut if block_id in self._ram)

    def _take(self) -> tuple[list[Entry], list[BlockId]]:
        """Queued blocks for one frame, pinned, each after its ancestors; and those whose ancestors alone fill it."""
        taken: dict[BlockId, Entry] = {}
        cut: list[BlockId] = []
        room = self._ssd.frame_bytes
        while self._queue:
            block_id = next(iter(self._queue))
            path = self._unwritten_path(block_id, taken)
            size = sum(frame_share(entry.header, entry.slot.num_bytes) for entry in path)
            if taken and (size > room or len(taken) + len(path) > MAX_FRAME_RECORDS):
                break
            del self._queue[block_id]
            fitting = self._fitting(path)
            for entry in fitting:
                self._ram.pin(entry)
                taken[entry.block_id] = entry
                self._queue.pop(entry.block_id, None)
                room -= frame_share(entry.header, entry.slot.num_bytes)
            if fitting and len(fitting) < len(path):
                cut.append(block_id)
            elif path and not fitting:
                self._ssd.totals.dropped(1)
        return list(taken.values()), cut

    def _fitting(self, path: list[Entry]) -> list[Entry]:
        """The leading blocks of a path that one frame can take."""
        room = self._ssd.frame_bytes
        for i, entry in enumerate(path[:MAX_FRAME_RECORDS]):
            room -= frame_share(entry.header, entry.slot.num_bytes)
            if room < 0:
                return path[:i]
        return path[:MAX_FRAME_RECORDS]

    def _unwritten_path(self, block_id: BlockId, taken: dict[BlockId, Entry]) -> list[Entry]:
        """The block and its ancestors that are neither on the SSD nor taken, parents first."""
        path: list[Entry] = []
        entry = self._ram.peek(block_id)
        while entry is not None and entry.block_id not in self._ssd and entry.block_id not in taken:
            path.append(entry)
            entry = self._ram.peek(entry.parent_id) if entry.parent_id is not None else None
        return path[::-1]

    def _spill(self, entry: Entry) -> Spill:
        block = NewBlock(entry.header, entry.owner, entry.created_s, self._ram.view(entry))
        return Spill(entry.block_id, entry.parent_id, block, lambda: not entry.gone)
