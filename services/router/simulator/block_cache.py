"""A worker's blocks as counts and ids: what running sequences hold, and the prefix cache that they leave behind. Pure.

A block is private to a sequence, shared by id among sequences that hold it, or idle: held by nobody and evicted when
room is needed, least recently used first. private + shared + idle <= capacity always. Sequences hold whole prefixes
and let go of descendants first, so an idle block is never older than its idle descendants, and what is evicted is a
leaf: the set of ids stays prefix-closed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from services.common.blocks import BlockId


class BlockCache:
    """Of `capacity` blocks. Only this class counts them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.private = 0
        self._holders: dict[BlockId, int] = {}
        self._idle: OrderedDict[BlockId, None] = OrderedDict()
        # Net change since `take_changes`: True came, False left.
        self._changes: dict[BlockId, bool] = {}

    @property
    def available(self) -> int:
        """Blocks that `take` could give, evicting all that is idle."""
        return self.capacity - self.private - len(self._holders)

    @property
    def idle(self) -> int:
        """Blocks that nobody holds."""
        return len(self._idle)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._holders or block_id in self._idle

    def ids(self) -> set[BlockId]:
        """All ids present."""
        return {*self._holders, *self._idle}

    def match(self, ids: Sequence[BlockId]) -> int:
        """How many of the leading `ids` are present."""
        holders, idle = self._holders, self._idle
        for at, block_id in enumerate(ids):
            if block_id not in holders and block_id not in idle:
                return at
        return len(ids)

    def count_idle(self, ids: Sequence[BlockId]) -> int:
        """How many of `ids` nobody holds: holding them makes that many fewer available."""
        return sum(block_id in self._idle for block_id in ids)

    def hold(self, ids: Sequence[BlockId]) -> None:
        """One more holder of each of `ids`, all present, a prefix."""
        for block_id in ids:
            if block_id in self._idle:
                del self._idle[block_id]
                self._holders[block_id] = 1
            else:
                self._holders[block_id] += 1

    def release(self, ids: Sequence[BlockId]) -> None:
        """One holder less of each of `ids`, a prefix."""
        holders = self._holders
        for block_id in reversed(ids):
            left = holders[block_id] - 1
            if left:
                holders[block_id] = left
            else:
                del holders[block_id]
                self._idle[block_id] = None

    def take(self, count: int) -> None:
        """`count` private blocks, no more than `available`; idle ones make room."""
        assert count <= self.available
        self.private += count
        while self.private + len(self._holders) + len(self._idle) > self.capacity:
            self._note(self._idle.popitem(last=False)[0], came=False)

    def give_back(self, count: int) -> None:
        """Undo `take`."""
        assert count <= self.private
        self.private -= count

    def register(self, ids: Sequence[BlockId]) -> None:
        """As many private blocks become shared ones under `ids`, which follow what their sequence holds."""
        self.give_back(len(ids))
        for block_id in ids:
            if block_id in self:
                self.hold((block_id,))
            else:
                self._holders[block_id] = 1
                self._note(block_id, came=True)

    def take_changes(self) -> tuple[list[BlockId], list[BlockId]]:
        """Ids that came, parents first, and ids that left, since the last call."""
        changes, self._changes = self._changes, {}
        return [id_ for id_, came in changes.items() if came], [id_ for id_, came in changes.items() if not came]

    def _note(self, block_id: BlockId, *, came: bool) -> None:
        if self._changes.pop(block_id, came) is came:
            self._changes[block_id] = came
