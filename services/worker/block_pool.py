"""The block pool: which slot holds which block, who refers to it, and what may be evicted. Pure bookkeeping.

A slot is free, referenced, or cached (has an id, nobody refers to it); free + referenced + cached = total always.
A block refers to its parent for as long as it is referenced itself, so an ancestor is never less referenced than its
descendants and every unreferenced block can be evicted, leaves first. The set of ids held is thereby prefix-closed.
Ids are 128-bit keyed digests that only members of the mesh can form: a hit is trusted without comparing tokens.
Only this class changes reference counts.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.common.blocks import BlockId


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Slots by state."""

    free: int
    referenced: int
    cached: int

    @property
    def available(self) -> int:
        """Slots that could be allocated now."""
        return self.free + self.cached


class BlockPool:
    """`num_blocks` slots with reference counts, a prefix cache and least-recently-used eviction."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._ids: list[BlockId | None] = [None] * num_blocks
        self._parents: list[int | None] = [None] * num_blocks
        self._children = [0] * num_blocks
        self._last_used = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._slots: dict[BlockId, int] = {}
        # Unreferenced leaves as (last use, slot); an entry that no longer describes its slot is skipped.
        self._leaves: list[tuple[int, int]] = []
        self._uses = 0
        self._num_cached = 0
        # Net change since `take_changes`: True announced, False withdrawn.
        self._changes: dict[BlockId, bool] = {}

    @property
    def statistics(self) -> PoolStatistics:
        """Slots by state, now."""
        free = len(self._free)
        return PoolStatistics(free, self.num_blocks - free - self._num_cached, self._num_cached)

    @property
    def num_available(self) -> int:
        """Slots that `allocate` could return now."""
        return len(self._free) + self._num_cached

    def match(self, ids: Sequence[BlockId]) -> list[int]:
        """Slots of the leading `ids` that are present. Takes no reference."""
        slots: list[int] = []
        for block_id in ids:
            slot = self._slots.get(block_id)
            if slot is None:
                break
            slots.append(slot)
        return slots

    def count_unreferenced(self, slots: Sequence[int]) -> int:
        """How many of `slots` nobody refers to: holding them makes that many fewer available."""
        return sum(not self._refs[slot] for slot in slots)

    def count_freed(self, slots: Sequence[int]) -> int:
        """How many more slots would be available if `slots` were released."""
        left: dict[int, int] = {}
        freed, to_release = 0, list(slots)
        while to_release:
            slot = to_release.pop()
            left[slot] = left.get(slot, self._refs[slot]) - 1
            if not left[slot]:
                freed += 1
                parent = self._parents[slot]
                if parent is not None:
                    to_release.append(parent)
        return freed

    def parent_of(self, slot: int) -> int | None:
        """Slot of the parent block; None for a first block and for one without an id."""
        return self._parents[slot]

    def id_of(self, slot: int) -> BlockId | None:
        """Id of the block in `slot`; None while it is private to its holder."""
        return self._ids[slot]

    def held_ids(self) -> Iterable[BlockId]:
        """Ids of all blocks that are present."""
        return self._slots.keys()

    def hold(self, slots: Sequence[int]) -> None:
        """Take a reference to each slot, and through it to its ancestors."""
        for slot in slots:
            self._acquire(slot)

    def release(self, slots: Sequence[int], *, keep_age: bool = False) -> None:
        """Give back one reference to each slot. In prefix order; descendants are let go first.

        keep_age: what was held was not used, and goes when it would have gone.
        """
        self._uses += 1
        for slot in reversed(slots):
            self._let_go(slot, keep_age=keep_age)
        if len(self._leaves) > 4 * self.num_blocks + 64:
            self._leaves = [entry for entry in set(self._leaves) if self._is_leaf(*entry)]
            heapq.heapify(self._leaves)

    def allocate(self, count: int) -> list[int] | None:
        """`count` slots with one reference each, evicting as needed; None, and nothing changed, if too few.

        In order of memory: blocks that adjoin move between processes as one.
        """
        if count > self.num_available:
            return None
        while len(self._free) < count:
            self._evict_one()
        slots = sorted(self._free.pop() for _ in range(count))
        for slot in slots:
            self._refs[slot] = 1
        return slots

    def next_to_go(self, count: int) -> list[int]:
        """Leaves that `allocate` would evict first, in that order. Takes no reference."""
        entries: dict[tuple[int, int], None] = {}
        while self._leaves and len(entries) < count:
            entry = heapq.heappop(self._leaves)
            if self._is_leaf(*entry):
                entries[entry] = None
        for entry in entries:
            heapq.heappush(self._leaves, entry)
        return [slot for _, slot in entries]

    def register(self, slot: int, block_id: BlockId, parent: int | None) -> int:
        """Make the held block of `slot` reusable under `block_id`, after the registered block in `parent`.

        Returns the slot to use from now on: where the block is present already that one, with the caller's reference
        moved there and `slot` given back.
        """
        present = self._slots.get(block_id)
        if present == slot:
            return slot
        if present is not None:
            self._acquire(present)
            self._let_go(slot)
            return present
        self._ids[slot] = block_id
        self._slots[block_id] = slot
        self._parents[slot] = parent
        if parent is not None:
            self._children[parent] += 1
            self._acquire(parent)
        self._note(block_id, added=True)
        return slot

    def take_changes(self) -> tuple[list[BlockId], list[BlockId]]:
        """Ids that became reusable, parents first, and ids that left, descendants first, since the last call."""
        changes, self._changes = self._changes, {}
        return (
            [block_id for block_id, added in changes.items() if added],
            [block_id for block_id, added in changes.items() if not added],
        )

    def check(self) -> None:
        """Assert the invariants of the module docstring; for tests and idle moments (O(total))."""
        unreferenced = [slot for slot in range(self.num_blocks) if not self._refs[slot]]
        cached = [slot for slot in unreferenced if self._ids[slot] is not None]
        assert len(cached) == self._num_cached
        assert sorted(self._free) == [slot for slot in unreferenced if self._ids[slot] is None]
        assert len(self._slots) == sum(block_id is not None for block_id in self._ids)
        children = [0] * self.num_blocks
        for block_id, slot in self._slots.items():
            assert self._ids[slot] == block_id
            parent = self._parents[slot]
            if parent is not None:
                assert self._ids[parent] is not None
                assert self._refs[parent] or not self._refs[slot]
                children[parent] += 1
        assert children == self._children
        leaves = {slot for used, slot in self._leaves if self._is_leaf(used, slot)}
        assert leaves == {slot for slot in cached if not self._children[slot]}

    def _acquire(self, slot: int) -> None:
        step: int | None = slot
        while step is not None:
            self._refs[step] += 1
            if self._refs[step] > 1:
                return
            # Only a cached block can be taken from zero; it begins to refer to its parent.
            self._num_cached -= 1
            step = self._parents[step]

    def _let_go(self, slot: int, *, keep_age: bool = False) -> None:
        step: int | None = slot
        while step is not None:
            assert self._refs[step] > 0, "released more often than held"
            self._refs[step] -= 1
            if not keep_age:
                self._last_used[step] = self._uses
            if self._refs[step]:
                return
            if self._ids[step] is None:
                self._free.append(step)
                return
            self._num_cached += 1
            if not self._children[step]:
                heapq.heappush(self._leaves, (self._last_used[step], step))
            step = self._parents[step]

    def _is_leaf(self, used: int, slot: int) -> bool:
        return (
            self._last_used[slot] == used
            and not self._refs[slot]
            and not self._children[slot]
            and self._ids[slot] is not None
        )

    def _evict_one(self) -> None:
        used, slot = heapq.heappop(self._leaves)
        while not self._is_leaf(used, slot):
            used, slot = heapq.heappop(self._leaves)
        block_id, parent = self._ids[slot], self._parents[slot]
        assert block_id is not None
        del self._slots[block_id]
        self._ids[slot] = self._parents[slot] = None
        self._num_cached -= 1
        self._free.append(slot)
        self._note(block_id, added=False)
        if parent is not None:
            self._children[parent] -= 1
            if not self._children[parent] and not self._refs[parent]:
                heapq.heappush(self._leaves, (self._last_used[parent], parent))

    def _note(self, block_id: BlockId, *, added: bool) -> None:
        if self._changes.pop(block_id, added) is added:
            self._changes[block_id] = added
