"""The generations of tenants whose cached blocks were cleared: which owners' blocks still count. Pure.

A generation is a time, in microseconds, and only ever grows: what two processes know is joined by taking the larger
one, in any order and as often as they like. A tenant that was never cleared has generation 0 and no entry.
"""

from __future__ import annotations

from collections.abc import Mapping

from services.common.blocks import split_owner

# Tenants that can have an entry; clearing one more is refused.
MAX_TENANTS = 65_536
# A time 140 years from 1970. Redis counts exactly to twice that, so that there is always a larger one.
MAX_GENERATION = 2**52


class Generations:
    """The newest generation known of each tenant, by its tag."""

    def __init__(self) -> None:
        self._newest: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._newest)

    def of(self, tag: bytes) -> int:
        """The generation of a tenant's new blocks."""
        return self._newest.get(tag, 0)

    def is_dead(self, owner: bytes) -> bool:
        """Whether an owner's tenant has been cleared since."""
        tag, generation = split_owner(owner)
        return generation < self._newest.get(tag, 0)

    def merge(self, found: Mapping[bytes, int]) -> dict[bytes, int]:
        """Take what is newer in `found`; returns that part."""
        raised = {tag: generation for tag, generation in found.items() if generation > self.of(tag)}
        self._newest.update(raised)
        return raised

    def beyond(self, found: Mapping[bytes, int]) -> dict[bytes, int]:
        """What is known here and missing or older in `found`."""
        return {tag: generation for tag, generation in self._newest.items() if generation > found.get(tag, 0)}
