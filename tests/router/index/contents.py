"""What a replica has of a location, read from its block map."""

from __future__ import annotations

from services.common.announcements import Tier
from services.common.blocks import BlockId
from services.router.index.block_map import BlockMap, HeldSet
from services.router.index.replica import Replica

# The map keeps apart what is in memory, whichever, and what is on an SSD.
MEMORY = Tier.HBM


def contents(blocks: BlockMap, held: HeldSet) -> dict[BlockId, int]:
    return {
        id_: Tier.SSD if blocks.is_on_ssd(held, id_) else MEMORY
        for part in blocks._parts
        for id_, number in part.items()
        if blocks._sets.masks[number] >> held.slot & 1
    }


def held_by(replica: Replica, name: str) -> dict[BlockId, int] | None:
    location = replica.locations.get(name)
    return None if location is None else contents(replica.blocks, location.held)


def as_kept(entries: dict[BlockId, int]) -> dict[BlockId, int]:
    """`entries` with the tiers that a map keeps."""
    return {id_: tier if tier == Tier.SSD else MEMORY for id_, tier in entries.items()}
