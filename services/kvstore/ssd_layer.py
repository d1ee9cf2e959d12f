"""What the store needs of the SSD: extend a lease, bring a parent to RAM, follow evictions, spill, expire."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from services.common.blocks import BlockId
from services.common.transfer.protocol import STOP_COMPLETE, STOP_DEADLINE, STOP_OVERLOAD, PullRequest
from services.kvstore.ram_tier import Entry, RamTier
from services.kvstore.ssd_loader import LOAD_BYTES, Allocate, LoaderStatistics, Promoted, SsdLoader
from services.kvstore.ssd_spiller import SpillerStatistics, SsdSpiller
from services.kvstore.ssd_tier import SsdStatistics, SsdTier

# Share of a pull's deadline that reading may take, the rest is for sending; and the longest time.
_READ_SHARE, _MAX_READ_S = 0.5, 1.5
# Most that is read so that an offered block has its parent in RAM.
_BRING_BYTES = 64 * 2**20
# Longest that an offer waits for the disk.
_CATCH_UP_S = 0.25
_EXPIRE_EVERY_S = 30.0
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class SsdLayerStatistics:
    """Of its parts, at one moment."""

    tier: SsdStatistics
    spiller: SpillerStatistics
    loader: LoaderStatistics


class SsdLayer:
    """Joins tier, loader and spiller. `run` until cancelled, then `close`."""

    def __init__(self, ram: RamTier, tier: SsdTier, allocate: Allocate, promoted: Promoted) -> None:
        self.tier = tier
        self.spiller = SsdSpiller(ram, tier)
        self._ram = ram
        self._loader = SsdLoader(ram, tier, allocate, promoted)

    def statistics(self) -> SsdLayerStatistics:
        """A snapshot."""
        return SsdLayerStatistics(self.tier.statistics(), self.spiller.statistics(), self._loader.statistics())

    async def run(self) -> None:
        """Spill, and expire where there is a maximum age. An error of our own ends the tier, not the node."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.spiller.run())
                group.create_task(self._expire())
        except* Exception as errors:
            _log.exception("the ssd tier failed")
            self.tier.switch_off(errors.exceptions[0])

    async def extend(self, entries: list[Entry], request: PullRequest) -> str:
        """Append blocks from the SSD to a lease that ends too early. Returns why it stopped, if not for lack."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + min(request.deadline_s * _READ_SHARE, _MAX_READ_S)
        while len(entries) < len(request.ids):
            wanted = request.ids[len(entries) :]
            run = self.tier.run(wanted, LOAD_BYTES)
            if not run:
                break
            try:
                async with asyncio.timeout_at(until_s):
                    await self._loader.load(run)
            except TimeoutError:
                return STOP_DEADLINE
            arrived = self._ram.lease(wanted)
            if not arrived:
                return STOP_OVERLOAD if wanted[0] in self.tier else STOP_COMPLETE
            entries += arrived
        return STOP_COMPLETE

    async def prepare(self, parent_id: BlockId | None) -> None:
        """For an offer: a pause when the disk lags, and its parent in RAM with the ancestors, if they are not many."""
        await self.spiller.caught_up(_CATCH_UP_S)
        if parent_id is None:
            return
        path = self.tier.path_to(parent_id, lambda step: step in self._ram)
        if path and sum(entry.payload_bytes for entry in path) <= _BRING_BYTES:
            await self._loader.load(path)

    def used(self, entries: Sequence[Entry]) -> None:
        """Blocks in RAM were wanted: what the SSD has lost meanwhile is written again."""
        self.spiller.offer(entry.block_id for entry in entries)

    def evicted(self, entries: Sequence[Entry]) -> set[BlockId]:
        """RAM has given these up. Returns which of them are here."""
        below = set()
        for entry in entries:
            self.spiller.evicted(entry.block_id)
            if entry.block_id in self.tier:
                below.add(entry.block_id)
                if entry.in_main:
                    self.tier.mark_hot(entry.block_id)
        return below

    def cleared(self, entries: Sequence[Entry]) -> set[BlockId]:
        """RAM has dropped these with their owner: they are not written any more. Returns which are here still."""
        for entry in entries:
            self.spiller.withdraw(entry.block_id)
        return {entry.block_id for entry in entries if entry.block_id in self.tier}

    async def flush(self, timeout_s: float) -> bool:
        """Write what waits, for at most this long; `run` must be running. False when something is left."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.spiller.flushed()
        except TimeoutError:
            queued = self.spiller.statistics().num_queued
            _log.warning("blocks were not written in time", queued_blocks=queued, timeout_s=timeout_s)
            return False
        return True

    async def close(self) -> None:
        """Close the files; what was not written is lost with RAM."""
        await self._loader.drain()
        await self.tier.close()

    async def _expire(self) -> None:
        while self.tier.max_age_s and self.tier.is_on:
            await asyncio.sleep(min(_EXPIRE_EVERY_S, self.tier.max_age_s / 2))
            await self.tier.expire()
