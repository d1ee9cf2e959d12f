"""Stretches of prefixes that many locations hold to different depths, with the depth of each location ready.

Derived from the block map, which stays the truth. A segment is consecutive blocks of one prefix and, by slot, how many
of its leading blocks that slot holds; an addition or removal changes one number. A lookup that comes upon a segment's
first block takes the rest of the segment in one array operation, where a walk would take a step for each depth that
anybody has. A prompt may part from a segment within it: ids are chained digests, so equal ids have equal prefixes.

A block of a segment has a number of its own in the holder sets, which tells its place. A block that nobody holds any
more ends its segment before it. Segments are bounded in number and blocks; the one that was used longest ago goes. A
lookup uses those before a segment too, so what goes first is at a prefix's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from services.common.blocks import BlockId
from services.router.index.holder_sets import HolderSets
from services.router.index.runs import Runs

MAX_SEGMENTS = 128
MAX_SEGMENT_BLOCKS = 512
MAX_BLOCKS = 65_536

# Leading blocks held, by slot.
Depths = npt.NDArray[np.int32]
# Of a block map: number by id, apart by the id's first byte.
Parts = list[dict[BlockId, int]]


@dataclass(slots=True, eq=False)
class Segment:
    """ids, numbers: of its blocks, in order. depths: by slot, of those there were, how many leading blocks it holds."""

    ids: list[BlockId]
    numbers: list[int]
    depths: Depths
    # The same memory: single numbers are read and written in half the time.
    cells: memoryview[int] = field(init=False)

    def __post_init__(self) -> None:
        self.cells = memoryview(self.depths)  # type: ignore[arg-type]

    def have_slots(self, num_slots: int) -> None:
        """`depths` has at least so many."""
        lacking = num_slots - len(self.depths)
        if lacking > 0:
            self.depths = np.pad(self.depths, (0, max(lacking, num_slots // 4)))
            self.cells = memoryview(self.depths)  # type: ignore[arg-type]

    def shared_with(self, ids: Sequence[BlockId], at: int) -> int:
        """How many of its leading blocks `ids` has from `at` on, where it has the first."""
        least, most = 1, min(len(self.ids), len(ids) - at)
        middle = most
        while least < most:
            if ids[at + middle - 1] == self.ids[middle - 1]:
                least = middle
            else:
                most = middle - 1
            middle = (least + most + 1) // 2
        return least


@dataclass(frozen=True, slots=True)
class Passed:
    """The part of a prompt that segments answer: of `num_blocks` leading ones, how many each slot holds."""

    num_blocks: int
    depths: Depths

    def alive(self) -> int:
        """Slots that hold all of it, as a mask."""
        flags = np.packbits(self.depths == self.num_blocks, bitorder="little")
        return int.from_bytes(flags.tobytes(), "little")


class Segments:
    """All segments of one block map; only it changes the numbers of their blocks."""

    def __init__(self, parts: Parts, sets: HolderSets) -> None:
        self._parts = parts
        self._sets = sets
        # Where a number is a segment's block: the segment and the block's place. Others are in no segment.
        self.places: dict[int, tuple[Segment, int]] = {}
        # Longest unused first.
        self._by_use: dict[Segment, None] = {}

    def __len__(self) -> int:
        return len(self._by_use)

    def follow(self, ids: Sequence[BlockId], shown: npt.NDArray[np.bool_]) -> Passed | None:
        """Go through segments from the first of `ids` on, for slots in `shown`; None where none begins there."""
        at, depths, passed = 0, None, []
        while at < len(ids):
            segment, offset = self.places.get(self._parts[ids[at][0]].get(ids[at], -1), (None, 0))
            if segment is None or offset:
                break
            share = segment.shared_with(ids, at)
            segment.have_slots(len(shown))
            here = np.minimum(segment.depths[: len(shown)], share)
            depths = here * shown if depths is None else depths + here * (depths == at)
            at += share
            passed.append(segment)
            if share < len(segment.ids):
                break
        for segment in reversed(passed):
            self._by_use[segment] = self._by_use.pop(segment)
        return None if depths is None else Passed(at, depths)

    def build(self, ids: Sequence[BlockId], num_slots: int) -> None:
        """Make a segment of the leading blocks of `ids` that anybody holds. What is in others goes out of them."""
        known: dict[BlockId, None] = {}
        for id_ in ids[:MAX_SEGMENT_BLOCKS]:
            number = self._parts[id_[0]].get(id_)
            if number is None or id_ in known:
                break
            known[id_] = None
            if number in self.places:
                self._cut(*self.places[number])
        while self._by_use and (len(self._by_use) == MAX_SEGMENTS or len(self.places) + len(known) > MAX_BLOCKS):
            self._cut(next(iter(self._by_use)), 0)
        if known:
            self._make(list(known), num_slots)

    def changed(self, number: int, mask: int, slot: int) -> None:
        """The block with this number has the holders `mask` now; `slot` may have come or gone."""
        segment, offset = self.places[number]
        self._sets.masks[number] = mask
        if not mask:
            self._cut(segment, offset)
            return
        if slot >= len(segment.cells):
            segment.have_slots(slot + 1)
        depth = segment.cells[slot]
        if not mask >> slot & 1:
            segment.cells[slot] = min(depth, offset)
        elif depth == offset:
            masks, numbers = self._sets.masks, segment.numbers
            depth += 1
            while depth < len(numbers) and masks[numbers[depth]] >> slot & 1:
                depth += 1
            segment.cells[slot] = depth

    def sweep(self, part: dict[BlockId, int], gone: int) -> None:
        """Blocks in `part` are not held by the slots in `gone` any more, which are not shown."""
        if not self.places:
            return
        masks = self._sets.masks
        for number in self.places.keys() & set(part.values()):
            # Cutting a segment ends others of these numbers.
            if number in self.places and masks[number] & gone:
                masks[number] &= ~gone
                if not masks[number]:
                    self._cut(*self.places[number])

    def forget(self, slots: Sequence[int]) -> None:
        """These hold nothing any more."""
        gone = np.array(slots, np.intp)
        for segment in self._by_use:
            segment.depths[gone[gone < len(segment.depths)]] = 0

    def _make(self, ids: list[BlockId], num_slots: int) -> None:
        sets = self._sets
        held = [sets.masks[self._parts[id_[0]][id_]] for id_ in ids]
        segment = Segment(ids, [sets.new_own(mask) for mask in held], _runs_of(held).lengths(num_slots))
        for offset, (id_, number) in enumerate(zip(ids, segment.numbers, strict=True)):
            part = self._parts[id_[0]]
            sets.move(part[id_], None, 1)
            part[id_] = number
            self.places[number] = segment, offset
        self._by_use[segment] = None

    def _cut(self, segment: Segment, length: int) -> None:
        """Keep so many blocks of it: the others are ordinary ones again, and gone where nobody holds them."""
        sets = self._sets
        for id_, number in zip(segment.ids[length:], segment.numbers[length:], strict=True):
            part = self._parts[id_[0]]
            after = sets.number_of(sets.masks[number])
            if after is None:
                del part[id_]
            else:
                part[id_] = after
                sets.move(None, after, 1)
            del self.places[number]
            sets.free_own(number)
        del segment.ids[length:], segment.numbers[length:]
        if length:
            np.minimum(segment.depths, length, out=segment.depths)
        else:
            del self._by_use[segment]


def _runs_of(masks: list[int]) -> Runs:
    """How many of the leading blocks with these holders each slot holds."""
    runs = []
    alive = masks[0]
    for at, mask in enumerate(masks):
        if left := alive & ~mask:
            runs.append((at, left))
            alive &= mask
    if alive:
        runs.append((len(masks), alive))
    return Runs(tuple(runs))
