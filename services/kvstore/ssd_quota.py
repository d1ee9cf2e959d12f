"""What is to be written to the SSD, and which of it fits its tenant's quota. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from services.common.blocks import TENANT_TAG_BYTES, BlockId
from services.kvstore.ssd_index import SsdIndex
from services.kvstore.ssd_log import NewBlock

Drop = Callable[[Sequence[BlockId]], object]


@dataclass(frozen=True, slots=True)
class Spill:
    """A block to be written: its identity beside what the log stores. is_wanted: asked before and after the write."""

    block_id: BlockId
    parent_id: BlockId | None
    block: NewBlock
    is_wanted: Callable[[], bool] = lambda: True


class Quota:
    """At most so much payload of one tenant, over all its generations; its oldest leaves go first."""

    def __init__(self, limit_bytes: int) -> None:
        """limit_bytes 0: no limit."""
        self._limit_bytes = limit_bytes

    def make_room(self, index: SsdIndex, spills: list[Spill], drop: Drop) -> list[Spill]:
        """The leading ones that have room, after `drop` was called for what had to go for them."""
        if not self._limit_bytes:
            return spills
        spared = {spill.parent_id for spill in spills if spill.parent_id is not None}
        fitting: list[Spill] = []
        planned: dict[bytes, int] = {}
        for spill in spills:
            owner, size = spill.block.owner, len(spill.block.payload)
            tenant = owner[:TENANT_TAG_BYTES]
            while index.owner_bytes(owner) + planned.get(tenant, 0) + size > self._limit_bytes:
                victim = index.quota_victim(owner, spared)
                if victim is None:
                    return fitting
                drop([victim])
            planned[tenant] = planned.get(tenant, 0) + size
            fitting.append(spill)
        return fitting

    def shrink(self, index: SsdIndex, owners: Iterable[bytes]) -> None:
        """After a restart with another quota, or with records that had been dropped for one."""
        for owner in owners if self._limit_bytes else ():
            while index.owner_bytes(owner) > self._limit_bytes:
                if (victim := index.quota_victim(owner, ())) is None:
                    break
                index.remove([victim])
