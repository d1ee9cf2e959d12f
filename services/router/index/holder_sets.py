"""Sets of slots, interned: one object for each distinct set, counted by the blocks that have it.

A slot is a small number that stands for what one location holds; a set of them is the bits of an integer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# Up to this many bits of a set are taken out one by one, more of them with numpy.
FEW_BITS = 8


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


def flags_of(mask: int, num_slots: int) -> npt.NDArray[np.bool_]:
    """Of each slot, whether its bit is set in `mask`."""
    raw = np.frombuffer(mask.to_bytes((num_slots + 7) // 8, "little"), np.uint8)
    return np.unpackbits(raw, count=num_slots, bitorder="little").view(np.bool_)


def slots_of_each(masks: Sequence[int], num_slots: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """All bits of all masks: the number of the mask and the slot of each, in no order."""
    num_bytes = (num_slots + 7) // 8
    raw = np.frombuffer(b"".join([mask.to_bytes(num_bytes, "little") for mask in masks]), np.uint8)
    # Most bytes are zero where many sets are sparse: only the others are taken apart.
    places = np.flatnonzero(raw)
    which, bits = np.unpackbits(raw[places, None], axis=1, bitorder="little").nonzero()
    numbers, offsets = np.divmod(places[which], num_bytes)
    return numbers, offsets * 8 + bits


def slots_of(mask: int) -> list[int]:
    """Numbers of the bits set in `mask`, which are few."""
    slots = []
    while mask:
        top = mask.bit_length() - 1
        slots.append(top)
        mask ^= 1 << top
    return slots
