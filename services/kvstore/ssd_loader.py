"""Brings blocks from the SSD into RAM for those who wait for them.

A load is a task of its own: whoever waits may give up, the memory stays reserved until the reads are over. Two who
want the same blocks at once share one load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.common.blocks import BlockId
from services.kvstore.arena import Slot
from services.kvstore.ram_tier import RamTier
from services.kvstore.ssd_index import SsdEntry
from services.kvstore.ssd_tier import SsdTier

LOAD_BYTES = 16 * 2**20

Allocate = Callable[[int, bytes], Slot | None]
Promoted = Callable[[Sequence[SsdEntry]], None]


@dataclass(frozen=True, slots=True)
class LoaderStatistics:
    """Loads under way."""

    num_loads: int


class SsdLoader:
    """`allocate` may evict; `promoted` is told what is in RAM now, parents first."""

    def __init__(self, ram: RamTier, ssd: SsdTier, allocate: Allocate, promoted: Promoted) -> None:
        self._ram = ram
        self._ssd = ssd
        self._allocate = allocate
        self._promoted = promoted
        self._loads: dict[BlockId, asyncio.Task[int]] = {}

    async def load(self, run: Sequence[SsdEntry]) -> int:
        """Bring leading blocks of `run` into RAM; how many. Their parent must be lent meanwhile."""
        first = run[0].block_id
        task = self._loads.get(first)
        if task is None:
            task = self._loads[first] = asyncio.create_task(self._load(run))
            task.add_done_callback(lambda _: self._loads.pop(first, None))
        return await asyncio.shield(task)

    def statistics(self) -> LoaderStatistics:
        """A snapshot."""
        return LoaderStatistics(len(self._loads))

    async def drain(self) -> None:
        """Wait until no load runs."""
        if self._loads:
            await asyncio.wait(list(self._loads.values()))

    async def _load(self, run: Sequence[SsdEntry]) -> int:
        anchor = self._ram.hold(run[0].parent_id) if run[0].parent_id is not None else None
        slots = self._reserve(run)
        used = 0
        try:
            entries = run[: len(slots)]
            good = await self._ssd.read(entries, [self._ram.memory(slot) for slot in slots]) if slots else 0
            used = self._insert(entries[:good], slots)
            return used
        finally:
            for entry, slot in list(zip(run, slots, strict=False))[used:]:
                self._ram.discard(slot, entry.owner)
            if anchor is not None:
                self._ram.release([anchor])

    def _reserve(self, run: Sequence[SsdEntry]) -> list[Slot]:
        slots: list[Slot] = []
        for entry in run:
            slot = self._allocate(entry.payload_bytes, entry.owner)
            if slot is None:
                break
            slots.append(slot)
        return slots

    def _insert(self, entries: Sequence[SsdEntry], slots: Sequence[Slot]) -> int:
        """How many leading slots RAM has taken; it stops at a block that came by another way meanwhile."""
        for i, (entry, slot) in enumerate(zip(entries, slots, strict=False)):
            record = entry.place.record
            if not self._ram.insert(
                entry.block_id, entry.parent_id, slot, record.header, owner=entry.owner, created_s=record.created_s
            ):
                self._promoted(entries[:i])
                return i
        self._promoted(entries)
        return len(entries)
