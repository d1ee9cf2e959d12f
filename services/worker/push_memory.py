"""What the kvstore node has of this worker's blocks, and how much of the rest may be offered now. Pure.

Another target, or the same one started anew, has nothing that is known of. What the pool held before then is offered
again only at a bounded rate, so that a node that everybody turns to is not flooded; new blocks go at once. A node that
refuses a block may have evicted its ancestors: those count as not pushed, and as held before, from then on.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.common.blocks import BlockId
from services.worker.block_pool import BlockPool

Node = tuple[str, int]


class PushMemory:
    """Bounded by what the pool holds."""

    def __init__(self, pool: BlockPool, repush_blocks_per_s: float) -> None:
        self.target: Node | None = None
        # Counts targets; 0: there has been none.
        self.generation = 0
        self._pool = pool
        self._rate = repush_blocks_per_s
        self._allowed = 0.0
        self._counted_s = 0.0
        # Blocks that the target has or is being offered, and those that were here before it knew of them.
        self._pushed: set[BlockId] = set()
        self._old: set[BlockId] = set()

    def switch(self, target: Node | None, now: float) -> None:
        """Another node, the same one started anew, or none."""
        self.target = target
        self.generation += 1
        self._pushed.clear()
        self._old = set(self._pool.held_ids())
        self._allowed, self._counted_s = 0.0, now

    def missing(self, slot: int) -> list[int]:
        """The slot and its ancestors as far as the target lacks them, in prefix order."""
        chain: list[int] = []
        step: int | None = slot
        while step is not None and self._pool.id_of(step) not in self._pushed:
            chain.append(step)
            step = self._pool.parent_of(step)
        chain.reverse()
        return chain

    def take(self, slots: Sequence[int], now: float) -> list[int]:
        """The leading slots that may be offered now; they count as pushed until `refused`."""
        self._allowed = min(max(1.0, self._rate), self._allowed + (now - self._counted_s) * self._rate)
        self._counted_s = now
        taken: list[int] = []
        for slot in slots:
            block_id = self._pool.id_of(slot)
            assert block_id is not None, "only registered blocks are pushed"
            if block_id in self._old:
                if self._allowed < 1:
                    break
                self._allowed -= 1
            taken.append(slot)
            self._pushed.add(block_id)
        return taken

    def holds(self, block_id: BlockId) -> None:
        """The target has this block: it came from there."""
        self._pushed.add(block_id)

    def refused(self, ids: Sequence[BlockId]) -> None:
        """These did not get there; they may be offered again with a descendant."""
        self._pushed.difference_update(ids)

    def doubt_ancestors(self, slot: int) -> None:
        """The target would not take the block in `slot`: it may lack what comes before it."""
        step = self._pool.parent_of(slot)
        while step is not None and (block_id := self._pool.id_of(step)) is not None:
            self._pushed.discard(block_id)
            self._old.add(block_id)
            step = self._pool.parent_of(step)

    def count_missing(self, ids: Sequence[BlockId]) -> int:
        """How many of these the target neither has nor is being offered."""
        return sum(block_id not in self._pushed for block_id in ids)

    def forget(self, removed: Sequence[BlockId]) -> None:
        """Blocks left the pool."""
        self._pushed.difference_update(removed)
        self._old.difference_update(removed)
