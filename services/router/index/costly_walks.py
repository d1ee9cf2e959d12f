"""Which prefixes are looked up so often, at such a cost, that a segment of them pays.

As one rents skis until the rent has come to their price (Karlin et al., "Competitive snoopy caching", 1988): a segment
is built once the walks along a stretch have looked at twice as many blocks as building looks at. Whatever is asked
for, building then costs half as much as walking at most.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.common.blocks import BlockId

# Walks with fewer runs are about as fast as a segment.
_MIN_RUNS = 12
# Of a walk, by the place of its middle run rounded down to this: prompts that part later count as one.
_ANCHOR_BLOCKS = 64
# Prefixes that are counted, those walked last; of more than that each is asked for too seldom.
_PREFIXES = 128
_WALKED_PER_BUILT = 2


class CostlyWalks:
    """Counts walks by the stretch that they go along."""

    def __init__(self) -> None:
        # By the stretch's anchor: about how many blocks were looked at. Longest unused first.
        self._walked: dict[BlockId, int] = {}

    def count(self, ids: Sequence[BlockId], first: int, runs: Sequence[tuple[int, int]]) -> bool:
        """A walk along `ids` from `first` on had `runs`; whether a segment from there to the last one now pays."""
        if len(runs) < _MIN_RUNS:
            return False
        middle = runs[len(runs) // 2][0] - 1 - first
        anchor = ids[first + middle - middle % _ANCHOR_BLOCKS]
        num_blocks = runs[-1][0] - first
        walked = self._walked.pop(anchor, 0) + _num_looked_at(num_blocks, len(runs))
        if walked >= _WALKED_PER_BUILT * num_blocks:
            return True
        self._walked[anchor] = walked
        if len(self._walked) > _PREFIXES:
            del self._walked[next(iter(self._walked))]
        return False


def _num_looked_at(num_blocks: int, num_runs: int) -> int:
    """Blocks that bisection looks at, about: log2 of the blocks for each run."""
    return min(num_blocks, num_runs * (num_blocks.bit_length() - num_runs.bit_length() + 1))
