"""What one simulated kvstore node holds: blocks in RAM and behind them on an SSD, least recently used last. Pure.

A use counts for a block and all before it, the block first, so that none is older than its descendants. What RAM gives
up goes to the SSD, what the SSD gives up is gone, and what is used comes back to RAM: each tier gives up leaves only,
the node's set stays prefix-closed, and of a prefix the part in RAM comes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from services.common.announcements import Tier
from services.common.blocks import BlockId


class NodeStore:
    """Of so many blocks in each tier; without RAM there is no way in."""

    def __init__(self, ram_blocks: int, ssd_blocks: int) -> None:
        self._capacity = {Tier.RAM: ram_blocks, Tier.SSD: ssd_blocks}
        self._ram: OrderedDict[BlockId, None] = OrderedDict()
        self._ssd: OrderedDict[BlockId, None] = OrderedDict()
        # Where each block is that has moved since `take_changes`, None for nowhere.
        self._changes: dict[BlockId, Tier | None] = {}

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._ram or block_id in self._ssd

    @property
    def counts(self) -> tuple[int, int]:
        """Blocks in RAM and on the SSD."""
        return len(self._ram), len(self._ssd)

    def match(self, ids: Sequence[BlockId]) -> tuple[int, int]:
        """How many of the leading `ids` are here, and how many of the leading ones in RAM."""
        end = next((at for at, id_ in enumerate(ids) if id_ not in self), len(ids))
        return end, next((at for at, id_ in enumerate(islice(ids, end)) if id_ not in self._ram), end)

    def use(self, ids: Sequence[BlockId]) -> None:
        """A whole prefix is written or read: those that are not in RAM come there, and others make room."""
        for block_id in ids:
            if block_id not in self._ram:
                self._ssd.pop(block_id, None)
                self._changes[block_id] = Tier.RAM
        for block_id in reversed(ids):
            self._ram[block_id] = None
            self._ram.move_to_end(block_id)
        while len(self._ram) > self._capacity[Tier.RAM]:
            block_id, _ = self._ram.popitem(last=False)
            self._ssd[block_id] = None
            self._changes[block_id] = Tier.SSD
        while len(self._ssd) > self._capacity[Tier.SSD]:
            self._changes[self._ssd.popitem(last=False)[0]] = None

    def take_changes(self) -> tuple[list[tuple[BlockId, Tier]], list[BlockId]]:
        """Blocks that are in a tier now, and those that are gone, since the last call."""
        changes, self._changes = self._changes, {}
        present = [(block_id, tier) for block_id, tier in changes.items() if tier is not None]
        return present, [block_id for block_id, tier in changes.items() if tier is None]
