"""Block id -> who holds it, in memory.

What one location holds has a slot, and the slots of a block's holders are an interned set with a number. Most blocks
of a prefix have the very same holders, and holders are prefix-closed: who holds a block holds all before it. So a
lookup jumps: where two blocks of a prompt have the same number, all between them have it too. Where jumps are short,
along prefixes that many hold to many depths, lookups go through `segments` in one step.

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

from services.common.announcements import Tier, xor_of
from services.common.blocks import BlockId
from services.router.index.costly_walks import CostlyWalks
from services.router.index.holder_sets import HolderSets, slots_of
from services.router.index.runs import Runs
from services.router.index.segments import Segments

NUM_PARTS = 256
# What no block has: of the one before, where the next one must be looked at by itself.
_NO_NUMBER = -1


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
        self._segments = Segments(self._parts, self._sets)
        self._costly = CostlyWalks()
        # As a mask and, by slot, as flags; there may be fewer or more flags than slots.
        self._shown = 0
        self._shown_flags = np.zeros(0, np.bool_)
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

    @property
    def num_segments(self) -> int:
        """Stretches of prefixes that lookups take in one step."""
        return len(self._segments)

    def new_set(self) -> HeldSet:
        """An empty set, not shown."""
        return HeldSet(self._new_slot())

    def show(self, held: HeldSet) -> None:
        """`find` sees it from now on."""
        self._shown |= 1 << held.slot
        if held.slot >= len(self._shown_flags):
            self._shown_flags = np.pad(self._shown_flags, (0, held.slot + 1))
        self._shown_flags[held.slot] = True

    def retire(self, held: HeldSet) -> None:
        """`find` sees it no more; `sweep` removes what it held."""
        if self._shown >> held.slot & 1:
            self._shown ^= 1 << held.slot
            self._shown_flags[held.slot] = False
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
        bit, parts, sets, segments = 1 << held.slot, self._parts, self._sets, self._segments
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
                is_new = not mask & bit
                if number in segments.places:
                    segments.changed(number, self._with(held, mask, tier), held.slot)
                    before = _NO_NUMBER
                    new += [id_] * is_new
                    continue
                wanted = sets.number_of(self._with(held, mask, tier))
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
        segments = self._segments
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
                if number in segments.places:
                    if is_held:
                        gone.append(id_)
                        segments.changed(number, mask & keep, held.slot)
                    before = _NO_NUMBER
                    continue
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
        """How many of the leading `ids`, consecutive blocks of a prefix from its first, each shown set has."""
        if not ids:
            return Runs(())
        at, alive, passed = 0, self._shown, None
        if self._segments and (passed := self._segments.follow(ids, self._shown_flags[: self.num_slots])):
            at, alive = passed.num_blocks, passed.alive() if passed.num_blocks < len(ids) else 0
        runs = self._walk(ids, at, alive) if alive else []
        if self._costly.count(ids, at, runs):
            self._segments.build(ids[at : runs[-1][0]], self.num_slots)
        return Runs(tuple(runs), None if passed is None else passed.depths)

    def _walk(self, ids: Sequence[BlockId], at: int, alive: int) -> list[tuple[int, int]]:
        """Lengths of more than `at`, and the slots among `alive`, which hold `at` blocks, that have them.

        Bisection between the block reached and the last one, with every block looked at kept for what comes after:
        about log2(blocks) of them for each change of the holders, and never one of them twice.
        """
        runs: list[tuple[int, int]] = []
        parts, masks = self._parts, self._sets.masks
        here = parts[ids[at][0]].get(ids[at])
        alive = masks[here] & alive if here is not None else 0
        ahead = [(last, parts[ids[last][0]].get(ids[last]))] if (last := len(ids) - 1) > at else []
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
        return runs

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
        self._segments.sweep(part, gone)
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
        slots = slots_of(bits)
        self._segments.forget(slots)
        self._free_slots.extend(slots)


def _put(part: dict[BlockId, int], id_: BlockId, number: int | None) -> None:
    if number is None:
        del part[id_]
    else:
        part[id_] = number
