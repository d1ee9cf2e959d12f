"""Blocks that remote pullers read, and pullers that wait for blocks which are still being computed. Pure.

A pin is answered with the leading wanted blocks that are here, as far as a bound on all pins allows. One that may wait
while somebody computes the first of them is answered once that is here, or once nobody computes it any more; how long
it waits is the mover's affair, which takes it back (Unpin) when it has waited enough. A waiting pin holds nothing.
Every pin that is not taken back gets exactly one answer, and every answer with slots is ended by an Unpin.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from services.common.blocks import BlockId, split_ids
from services.worker.block_pool import BlockPool
from services.worker.mover_messages import PinBlocks, PinnedSlots


class Pins:
    """Pins of one pool, of `max_blocks` slots together at most."""

    def __init__(self, pool: BlockPool, max_blocks: int) -> None:
        self._pool = pool
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self._held: dict[int, list[int]] = {}
        self._waiting: dict[int, list[BlockId]] = {}

    def __len__(self) -> int:
        """Pins that hold blocks or wait."""
        return len(self._held) + len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held and nobody waits."""
        return not len(self)

    def pin(self, wanted: PinBlocks, is_coming: Callable[[BlockId], bool]) -> PinnedSlots | None:
        """Hold the leading wanted blocks that are here; None when the pin waits for the first of them.

        is_coming: whether somebody computes a block, or has it.
        """
        if wanted.key in self._held or wanted.key in self._waiting:
            return PinnedSlots(wanted.key, [])
        ids = split_ids(wanted.ids)
        slots = self._hold(wanted.key, ids)
        if slots or not wanted.may_wait or not is_coming(ids[0]):
            return PinnedSlots(wanted.key, slots)
        self._waiting[wanted.key] = ids
        return None

    def unpin(self, key: int) -> None:
        """The remote puller has read, or does not wait any more."""
        self._waiting.pop(key, None)
        slots = self._held.pop(key, [])
        self._num_blocks -= len(slots)
        self._pool.release(slots)

    def settle(self) -> list[PinnedSlots]:
        """Answers to the pins whose first block has come meanwhile."""
        answers = []
        for key, ids in list(self._waiting.items()):
            slots = self._hold(key, ids)
            if slots:
                del self._waiting[key]
                answers.append(PinnedSlots(key, slots))
        return answers

    def give_up(self, ids: Set[BlockId]) -> list[PinnedSlots]:
        """Empty answers to the pins that wait for one of `ids`, which nobody computes any more."""
        keys = [key for key, wanted in self._waiting.items() if wanted[0] in ids]
        for key in keys:
            del self._waiting[key]
        return [PinnedSlots(key, []) for key in keys]

    @property
    def awaited(self) -> set[BlockId]:
        """The blocks that pins wait for."""
        return {ids[0] for ids in self._waiting.values()}

    def _hold(self, key: int, ids: list[BlockId]) -> list[int]:
        slots = self._pool.match(ids)[: max(0, self._max_blocks - self._num_blocks)]
        if slots:
            self._pool.hold(slots)
            self._num_blocks += len(slots)
            self._held[key] = slots
        return slots
