"""Sets of slots, interned: one number for each distinct set, counted by the blocks that have it.

A slot is a small number that stands for what one location holds; a set of them is the bits of an integer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# Up to this many bits of a set are taken out one by one, more of them with numpy.
FEW_BITS = 8


class HolderSets:
    """All sets in use, numbered; a set that no block has any more is forgotten and its number used again.

    Numbers, and no objects: what maps blocks to them is then nothing that the garbage collector walks through, which
    took tens of milliseconds at a million blocks.
    """

    def __init__(self) -> None:
        # By number.
        self.masks: list[int] = []
        self._uses: list[int] = []
        self._free: list[int] = []
        self._numbers: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def number_of(self, mask: int) -> int | None:
        """The number of `mask`, None for the empty set. The caller `move`s a block there next."""
        if not mask:
            return None
        number = self._numbers.get(mask)
        if number is None:
            number = self._numbers[mask] = self._new(mask)
        return number

    def move(self, before: int | None, after: int | None, count: int) -> None:
        """So many blocks have the set `after` now and had `before`."""
        if not count or before == after:
            return
        if after is not None:
            self._uses[after] += count
        if before is not None:
            self._uses[before] -= count
            if not self._uses[before]:
                del self._numbers[self.masks[before]]
                self.masks[before] = 0
                self._free.append(before)

    def new_own(self, mask: int) -> int:
        """A number for one block alone, whose mask its user changes in place; no other block gets it."""
        return self._new(mask)

    def free_own(self, number: int) -> None:
        """The number of `new_own` is used no more."""
        self.masks[number] = 0
        self._free.append(number)

    def _new(self, mask: int) -> int:
        if self._free:
            number = self._free.pop()
            self.masks[number] = mask
            return number
        self.masks.append(mask)
        self._uses.append(0)
        return len(self.masks) - 1


def flags_of(mask: int, num_slots: int) -> npt.NDArray[np.bool_]:
    """Of each slot, whether its bit is set in `mask`."""
    raw = np.frombuffer(mask.to_bytes((num_slots + 7) // 8, "little"), np.uint8)
    return np.unpackbits(raw, count=num_slots, bitorder="little").view(np.bool_)


def slots_of_each(masks: Sequence[int], num_slots: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """All bits of all masks: the number of the mask and the slot of each, in no order."""
    num_bytes = (num_slots + 63) // 64 * 8
    raw = np.frombuffer(b"".join([mask.to_bytes(num_bytes, "little") for mask in masks]), np.uint8)
    # Most words are zero where many sets are sparse, and most bytes of the others: only the rest is taken apart.
    words = np.flatnonzero(raw.view(np.uint64))
    word, byte = raw.reshape(-1, 8)[words].nonzero()
    places = words[word] * 8 + byte
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
