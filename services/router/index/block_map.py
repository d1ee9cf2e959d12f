"""Block id -> who holds it, in memory.

What one location holds has a slot, and the slots of a block's holders are an interned set with a number. Most blocks
of a prefix have the very same holders, and holders are prefix-closed: who holds a block holds all before it. So a
lookup jumps: where two blocks of a prompt have the same number, all between them have it too.

A location may for a moment not be prefix-closed, as when a change of many blocks comes in parts. What a lookup says of
it then is still a place where the location holds one block and not the next, at or after its first gap: too long at
most, which costs a recomputation, since a worker looks at what it really has.

Nothing is kept for each pair of location and block but a bit in a shared set, so memory goes by distinct blocks. What
a retired location leaves behind is swept part by part, all retired ones in one pass, so that removing a large one
stops nobody; its slot is used again after that. The blocks are spread over many dictionaries by the ids' first byte
(ids are digests): that bounds a step of the sweep, and the pause when a dictionary grows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.common.announcements import Tier, xor_of
from services.common.blocks import BlockId
from services.router.index.holder_sets import FEW_BITS, HolderSets, flags_of, slots_of, slots_of_each

NUM_PARTS = 256
# More runs of many slots than this are taken apart all at once.
_FEW_LARGE = 8


@dataclass(frozen=True, slots=True)
class Runs:
    """Who holds how much of a prompt: of each (length, mask), slots in `mask` hold exactly `length` leading blocks.

    Lengths rise and are 1 or more; slots in no mask hold none.
    """

    runs: tuple[tuple[int, int], ...]

    def lengths(self, num_slots: int) -> npt.NDArray[np.int32]:
        """Leading blocks held, by slot."""
        result = np.zeros(num_slots, np.int32)
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


@dataclass(slots=True)
class HeldSet:
    """What one location holds: its size and the XOR of its ids. ssd_slot: of those on an SSD, -1 before the first."""

    slot: int
    ssd_slot: int = -1
    count: int = 0
    xor: int = 0

    @property
    def bits(self) -> int:
        """Both slots' bits."""
        return 1 << self.slot | (1 << self.ssd_slot if self.ssd_slot >= 0 else 0)


class BlockMap:
    """`add` and `remove` change one set, `find` looks a prompt up in those that are shown."""

    def __init__(self) -> None:
        self._parts: list[dict[BlockId, int]] = [{} for _ in range(NUM_PARTS)]
        self._sets = HolderSets()
        self._shown = 0
        self._free_slots: list[int] = []
        # Bits of retired sets: those of the present pass, which has come as far as the part _sweep_at, and later ones.
        self._sweeping = 0
        self._sweep_at = 0
        self._retired = 0
        self.num_slots = 0

    def __len__(self) -> int:
        """Distinct blocks, those of retired sets included until they are swept."""
        return sum(map(len, self._parts))

    @property
    def num_holder_sets(self) -> int:
        """Distinct sets of holders."""
        return len(self._sets)

    def new_set(self) -> HeldSet:
        """An empty set, not shown."""
        return HeldSet(self._new_slot())

    def show(self, held: HeldSet) -> None:
        """`find` sees it from now on."""
        self._shown |= 1 << held.slot

    def retire(self, held: HeldSet) -> None:
        """`find` sees it no more; `sweep` removes what it held."""
        self._shown &= ~(1 << held.slot)
        if held.count:
            self._retired |= held.bits
        else:
            self._free(held.bits)

    def sweep(self) -> bool:
        """Take retired sets out of one part of the map; whether there is more to do."""
        if not self._sweeping:
            self._sweeping, self._retired, self._sweep_at = self._retired, 0, 0
        if self._sweeping:
            self._sweep_part(self._parts[self._sweep_at])
            self._sweep_at += 1
            if self._sweep_at == NUM_PARTS:
                self._free(self._sweeping)
                self._sweeping = 0
        return bool(self._sweeping or self._retired)

    def add(self, held: HeldSet, entries: Iterable[tuple[BlockId, int]]) -> None:
        """`held` has these blocks in these tiers, whether or not it had them before."""
        bit, parts, sets = 1 << held.slot, self._parts, self._sets
        new: list[BlockId] = []
        before: int | None = None
        after, last_tier, is_new, moved = 0, -1, False, 0
        for id_, tier in entries:
            part = parts[id_[0]]
            number = part.get(id_)
            if number != before or tier != last_tier:
                sets.move(before, after, moved)
                before, last_tier, moved = number, tier, 0
                mask = sets.masks[number] if number is not None else 0
                is_new, wanted = not mask & bit, sets.number_of(self._with(held, mask, tier))
                assert wanted is not None
                after = wanted
            if is_new:
                new.append(id_)
            part[id_] = after
            moved += 1
        sets.move(before, after, moved)
        held.count += len(new)
        held.xor ^= xor_of(new)

    def remove(self, held: HeldSet, ids: Iterable[BlockId]) -> None:
        """`held` has `ids` no more; those that it did not have are ignored."""
        bit, keep, parts, sets = 1 << held.slot, ~held.bits, self._parts, self._sets
        gone: list[BlockId] = []
        before: int | None = None
        after: int | None = None
        is_held, moved = False, 0
        for id_ in ids:
            part = parts[id_[0]]
            number = part.get(id_)
            if number != before:
                sets.move(before, after, moved)
                before, moved = number, 0
                mask = sets.masks[number] if number is not None else 0
                is_held = bool(mask & bit)
                after = sets.number_of(mask & keep) if is_held else number
            if is_held:
                gone.append(id_)
                _put(part, id_, after)
                moved += 1
        sets.move(before, after, moved)
        held.count -= len(gone)
        held.xor ^= xor_of(gone)

    def is_on_ssd(self, held: HeldSet, id_: BlockId) -> bool:
        """Whether `held` has the block on an SSD."""
        number = self._parts[id_[0]].get(id_)
        return number is not None and held.ssd_slot >= 0 and bool(self._sets.masks[number] >> held.ssd_slot & 1)

    def find(self, ids: Sequence[BlockId]) -> Runs:
        """How many of the leading `ids` each shown set has.

        Bisection between the block reached and the last one, with every block looked at kept for what comes after:
        about log2(blocks) of them for each change of the holders, and never one of them twice.
        """
        runs: list[tuple[int, int]] = []
        if not ids:
            return Runs(())
        parts, masks = self._parts, self._sets.masks
        at, here = 0, parts[ids[0][0]].get(ids[0])
        alive = masks[here] & self._shown if here is not None else 0
        ahead = [(last, parts[ids[last][0]].get(ids[last]))] if (last := len(ids) - 1) else []
        while alive and ahead:
            right, there = ahead[-1]
            if there == here:
                at = right
                ahead.pop()
                continue
            left = alive & masks[there] if there is not None else 0
            if left != alive and right - at > 1:
                middle = (at + right) // 2
                id_ = ids[middle]
                ahead.append((middle, parts[id_[0]].get(id_)))
                continue
            if left != alive:
                runs.append((right, alive & ~left))
            at, here, alive = right, there, left
            ahead.pop()
        if alive:
            runs.append((at + 1, alive))
        return Runs(tuple(runs))

    def _with(self, held: HeldSet, mask: int, tier: int) -> int:
        """A block's mask once `held` has it in `tier`."""
        if tier == Tier.SSD:
            if held.ssd_slot < 0:
                held.ssd_slot = self._new_slot()
            return mask | held.bits
        mask |= 1 << held.slot
        return mask & ~(1 << held.ssd_slot) if held.ssd_slot >= 0 else mask

    def _sweep_part(self, part: dict[BlockId, int]) -> None:
        gone, sets = self._sweeping, self._sets
        concerned = [number for number in set(part.values()) if sets.masks[number] & gone]
        after = {number: sets.number_of(sets.masks[number] & ~gone) for number in concerned}
        moved = dict.fromkeys(concerned, 0)
        for id_, number in [item for item in part.items() if item[1] in after]:
            _put(part, id_, after[number])
            moved[number] += 1
        for number, count in moved.items():
            sets.move(number, after[number], count)

    def _new_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        self.num_slots += 1
        return self.num_slots - 1

    def _free(self, bits: int) -> None:
        self._free_slots.extend(map(int, slots_of(bits)))


def _put(part: dict[BlockId, int], id_: BlockId, number: int | None) -> None:
    if number is None:
        del part[id_]
    else:
        part[id_] = number
