"""Which slots of the staging area are taken, and for what. Pure bookkeeping.

Pulls, pushes and serving share the area; each has a most that it may hold, so that a burst of one leaves room for the
others. free + held by each use = total, always.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

StagingUse = Literal["pull", "push", "serve"]
USES: tuple[StagingUse, ...] = ("pull", "push", "serve")


@dataclass(frozen=True, slots=True)
class StagingStatistics:
    """Slots by state."""

    free: int
    held: dict[StagingUse, int]


class StagingSlots:
    """`num_slots` slots; of one slot everybody may have one, of more each use at most half, pulls three quarters."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError("a staging area has at least one slot")
        self.num_slots = num_slots
        self.most: dict[StagingUse, int] = {
            "pull": max(1, num_slots * 3 // 4),
            "push": max(1, num_slots // 2),
            "serve": max(1, num_slots // 2),
        }
        self._free = list(range(num_slots))
        self._held: dict[StagingUse, set[int]] = {use: set() for use in USES}

    @property
    def statistics(self) -> StagingStatistics:
        """Slots by state, now."""
        return StagingStatistics(len(self._free), {use: len(slots) for use, slots in self._held.items()})

    def room(self, use: StagingUse) -> int:
        """How many slots `take` would give at most."""
        return min(len(self._free), self.most[use] - len(self._held[use]))

    def take(self, use: StagingUse, wanted: int) -> list[int]:
        """Up to `wanted` slots, lowest first, so that they adjoin where they can; fewer where there is less room."""
        slots = [heapq.heappop(self._free) for _ in range(min(wanted, self.room(use)))]
        self._held[use].update(slots)
        return slots

    def give_back(self, use: StagingUse, slots: Sequence[int]) -> None:
        """Nobody reads or writes these any more."""
        assert self._held[use].issuperset(slots), "given back what was not held"
        self._held[use].difference_update(slots)
        for slot in slots:
            heapq.heappush(self._free, slot)
