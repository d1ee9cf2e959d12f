"""The memory of the RAM tier: one anonymous shared mapping, cut into slots of one size per block shape.

The mapping is divided into slabs; a slab serves slots of one size until all of them are free again, then any size. So
models with different block sizes share the memory without fragmenting it.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field

from services.common.transfer.shm_regions import create_region

MAX_SLAB_BYTES = 32 * 2**20
_MIN_SLABS = 8
_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in the mapping."""

    offset: int
    num_bytes: int
    slab: int


@dataclass(slots=True)
class _Slab:
    slot_bytes: int = 0
    free: list[int] = field(default_factory=list)
    used: int = 0


class Arena:
    """Allocates slots. Allocation never moves or evicts anything; it answers None when there is no room."""

    def __init__(self, capacity_bytes: int) -> None:
        """capacity_bytes: at least 64 KiB; memory is taken from the system as it is first written."""
        self.slab_bytes = _round_down(min(MAX_SLAB_BYTES, capacity_bytes // _MIN_SLABS))
        if self.slab_bytes < _ALIGNMENT:
            raise ValueError(f"an arena of {capacity_bytes} bytes is too small")
        count = capacity_bytes // self.slab_bytes
        self.capacity_bytes = count * self.slab_bytes
        # Where the platform allows it, memory that pullers on this host may read.
        self.region = create_region("kvmesh-arena", self.capacity_bytes, large_pages=True)
        self._view = self.region.view if self.region else memoryview(mmap.mmap(-1, self.capacity_bytes))
        self._slabs = [_Slab() for _ in range(count)]
        self._unused = list(range(count - 1, -1, -1))
        # Slabs of each slot size that have a free slot; dicts as ordered sets.
        self._with_room: dict[int, dict[int, None]] = {}

    def view(self, slot: Slot) -> memoryview:
        """The slot's memory."""
        return self._view[slot.offset : slot.offset + slot.num_bytes]

    def allocate(self, num_bytes: int) -> Slot | None:
        """A slot of exactly this size, None when there is no room or it exceeds a slab."""
        if not 0 < num_bytes <= self.slab_bytes:
            return None
        room = self._with_room.setdefault(num_bytes, {})
        if not room:
            if not self._unused:
                return None
            self._carve(self._unused.pop(), num_bytes)
        index = next(iter(room))
        slab = self._slabs[index]
        offset = slab.free.pop()
        slab.used += 1
        if not slab.free:
            del room[index]
        return Slot(offset, num_bytes, index)

    def free(self, slot: Slot) -> None:
        """Give a slot back; exactly once."""
        slab = self._slabs[slot.slab]
        slab.free.append(slot.offset)
        slab.used -= 1
        room = self._with_room[slot.num_bytes]
        room[slot.slab] = None
        if slab.used == 0:
            del room[slot.slab]
            slab.free.clear()
            self._unused.append(slot.slab)

    def _carve(self, index: int, slot_bytes: int) -> None:
        slab = self._slabs[index]
        slab.slot_bytes = slot_bytes
        start = index * self.slab_bytes
        slab.free = [start + i * slot_bytes for i in range(self.slab_bytes // slot_bytes)]
        slab.free.reverse()
        self._with_room[slot_bytes][index] = None


def _round_down(num_bytes: int) -> int:
    return num_bytes // _ALIGNMENT * _ALIGNMENT
