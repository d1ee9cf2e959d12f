"""Clears a tenant from both tiers of a node: its blocks at once, then the keys of what the SSD still holds.

Generations come from an operator's call or from Redis, in any order and more than once; each is carried out to its
end, so that whoever gets an answer knows that it was.
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from services.common.blocks import split_owner
from services.kvstore.store import Store

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Cleared:
    """What a tenant's latest clearing has taken from this node."""

    ram_blocks: int = 0
    ssd_blocks: int = 0
    keys: int = 0

    def plus(self, other: Cleared) -> Cleared:
        """The sum."""
        return Cleared(self.ram_blocks + other.ram_blocks, self.ssd_blocks + other.ssd_blocks, self.keys + other.keys)


class Clearing:
    """Carries out clearings on a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._done: dict[bytes, Cleared] = {}

    async def clear_older(self, owner: bytes) -> Cleared:
        """Drop the blocks of earlier generations of an owner's tenant, refuse them from now on, destroy their keys.

        Raises OSError, TimeoutError included, when a key could not be destroyed: the blocks are out of reach, but a
        restart might find them. Calling it again tries again.
        """
        tag, generation = split_owner(owner)
        if self._store.generations.merge({tag: generation}):
            self._done[tag] = Cleared()
        ram_blocks, ssd_blocks = self._store.drop_older(owner)
        self._count(tag, Cleared(ram_blocks, ssd_blocks))
        try:
            ssd = self._store.ssd
            keys = await ssd.tier.destroy_older_keys(owner) if ssd is not None else 0
        except OSError as error:
            detail = f"{type(error).__name__}: {error}"
            _log.error("the keys of a cleared tenant are still there", error=detail)
            raise
        self._count(tag, Cleared(keys=keys))
        _log.info("a tenant was cleared", ram_blocks=ram_blocks, ssd_blocks=ssd_blocks, keys=keys)
        return self._done[tag]

    def _count(self, tag: bytes, more: Cleared) -> None:
        self._done[tag] = self._done.get(tag, Cleared()).plus(more)
