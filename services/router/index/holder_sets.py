"""Sets of slots, interned: one object for each distinct set, counted by the blocks that have it.

A slot is a small number that stands for what one location holds; a set of them is the bits of an integer.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# Up to this many bits are taken out one by one, more of them with numpy.
_FEW_BITS = 8


class HolderSet:
    """One set and the number of blocks that have it."""

    __slots__ = ("mask", "uses")

    def __init__(self, mask: int) -> None:
        self.mask = mask
        self.uses = 0


class HolderSets:
    """All sets in use. A set that no block has any more is forgotten."""

    def __init__(self) -> None:
        self._by_mask: dict[int, HolderSet] = {}

    def __len__(self) -> int:
        return len(self._by_mask)

    def of(self, mask: int) -> HolderSet:
        """The one object of `mask`; the caller gives it to a block and counts that."""
        found = self._by_mask.get(mask)
        if found is None:
            found = self._by_mask[mask] = HolderSet(mask)
        return found

    def release(self, holders: HolderSet) -> None:
        """A block has it no more."""
        holders.uses -= 1
        if not holders.uses:
            del self._by_mask[holders.mask]


def slots_of(mask: int) -> list[int] | npt.NDArray[np.int64]:
    """Numbers of the bits set in `mask`."""
    if mask.bit_count() > _FEW_BITS:
        raw = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
        return np.flatnonzero(np.unpackbits(raw, bitorder="little"))
    slots = []
    while mask:
        top = mask.bit_length() - 1
        slots.append(top)
        mask ^= 1 << top
    return slots
