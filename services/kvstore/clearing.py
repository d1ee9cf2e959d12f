"""Clears a tenant from both tiers of a node: its blocks at once, then the keys of what the SSD still holds.

Generations come from an operator's call or from Redis, in any order and more than once; each is carried out to its
end, so that whoever gets an answer knows that it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
    destroyed_keys: int = 0

    def plus(self, other: Cleared) -> Cleared:
        """The sum."""
        return Cleared(
            self.ram_blocks + other.ram_blocks,
            self.ssd_blocks + other.ssd_blocks,
            self.destroyed_keys + other.destroyed_keys,
        )


class Clearing:
    """Carries out clearings on a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._done: dict[bytes, Cleared] = {}

    async def carry_out(self, table: Mapping[bytes, int]) -> None:
        """Drop each tenant's blocks of earlier generations, refuse them from now on, destroy their keys.

        table: generations by the tenants' tags. Raises OSError, TimeoutError included, when a key could not be
        destroyed: the blocks are out of reach, but a restart might find them. Calling it again tries again.
        """
        generations = self._store.generations
        self._done.update((tag, Cleared()) for tag in generations.merge(table))
        ram, ssd = self._store.drop_dead()
        self._count(ram, lambda count: Cleared(ram_blocks=count))
        self._count(ssd, lambda count: Cleared(ssd_blocks=count))
        layer = self._store.ssd
        try:
            keys = await layer.tier.destroy_keys(generations.is_dead) if layer is not None else []
        except OSError as error:
            detail = f"{type(error).__name__}: {error}"
            _log.error("the keys of a cleared tenant are still there", error=detail)
            raise
        self._count(keys, lambda count: Cleared(destroyed_keys=count))
        _log.info("tenants were cleared", tenants=len(table), ram_blocks=len(ram), ssd_blocks=len(ssd), keys=len(keys))

    def done(self, tag: bytes) -> Cleared:
        """What the tenant's latest clearing has taken so far."""
        return self._done.get(tag, Cleared())

    def _count(self, owners: Sequence[bytes], cleared: Callable[[int], Cleared]) -> None:
        for tag, count in Counter(split_owner(owner)[0] for owner in owners).items():
            self._done[tag] = self.done(tag).plus(cleared(count))
