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
    """free: offsets given back; fresh: of the first slot never used; fresh_end: the last that a slot can begin at."""

    free: list[int] = field(default_factory=list)
    fresh: int = 0
    fresh_end: int = -1
    used: int = 0

    @property
    def has_room(self) -> bool:
        return bool(self.free) or self.fresh <= self.fresh_end

    def take(self, slot_bytes: int) -> int:
        self.used += 1
        if self.free:
            return self.free.pop()
        self.fresh += slot_bytes
        return self.fresh - slot_bytes


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
        if not self._with_room.get(num_bytes):
            if not self._unused:
                return None
            self._carve(self._unused.pop(), num_bytes)
        room = self._with_room[num_bytes]
        index = next(iter(room))
        slab = self._slabs[index]
        offset = slab.take(num_bytes)
        if not slab.has_room:
            del room[index]
            self._forget_size(num_bytes)
        return Slot(offset, num_bytes, index)

    def free(self, slot: Slot) -> None:
        """Give a slot back; exactly once."""
        slab = self._slabs[slot.slab]
        slab.free.append(slot.offset)
        slab.used -= 1
        room = self._with_room.setdefault(slot.num_bytes, {})
        room[slot.slab] = None
        if slab.used == 0:
            del room[slot.slab]
            self._forget_size(slot.num_bytes)
            slab.free.clear()
            self._unused.append(slot.slab)

    def _carve(self, index: int, slot_bytes: int) -> None:
        slab = self._slabs[index]
        slab.fresh = index * self.slab_bytes
        slab.fresh_end = slab.fresh + self.slab_bytes - slot_bytes
        self._with_room.setdefault(slot_bytes, {})[index] = None

    def _forget_size(self, slot_bytes: int) -> None:
        # Peers choose sizes: none is remembered for ever.
        if not self._with_room[slot_bytes]:
            del self._with_room[slot_bytes]


def _round_down(num_bytes: int) -> int:
    return num_bytes // _ALIGNMENT * _ALIGNMENT
