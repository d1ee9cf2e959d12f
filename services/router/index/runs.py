"""What a lookup answers: how many leading blocks of a prompt each slot holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.router.index.holder_sets import FEW_BITS, flags_of, slots_of, slots_of_each

# More runs of many slots than this are taken apart all at once.
_FEW_LARGE = 8


@dataclass(frozen=True, slots=True)
class Runs:
    """Who holds how much of a prompt: of each (length, mask), slots in `mask` hold exactly `length` leading blocks.

    Lengths rise and are 1 or more. What slots in no mask hold is in `others`, by slot, or none where that is None.
    """

    runs: tuple[tuple[int, int], ...]
    others: npt.NDArray[np.int32] | None = None

    def lengths(self, num_slots: int) -> npt.NDArray[np.int32]:
        """Leading blocks held, by slot."""
        result = np.zeros(num_slots, np.int32)
        if self.others is not None:
            result[: len(self.others)] = self.others
        large: list[tuple[int, int]] = []
        for run in self.runs:
            length, mask = run
            if mask.bit_count() > FEW_BITS:
                large.append(run)
            else:
                for slot in slots_of(mask):
                    result[slot] = length
        if len(large) > _FEW_LARGE:
            numbers, slots = slots_of_each([mask for _, mask in large], num_slots)
            result[slots] = np.array([length for length, _ in large], np.int32)[numbers]
        else:
            for length, mask in large:
                result[flags_of(mask, num_slots)] = length
        return result
