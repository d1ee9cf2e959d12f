"""Ranges of KV heads: the share of a block that a tensor-parallel rank owns.

A block is `[kv_head][layer][k|v][token][head_dim]`, so the share of a range of heads is one contiguous part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.common.transfer.errors import BlockInvalid

# Also what the fields of a header can say.
MAX_HEADS = 65535


@dataclass(frozen=True, slots=True)
class HeadRange:
    """Heads `first` .. `first + count` of a block. Construction raises ValueError for a range of no or absurd heads."""

    first: int
    count: int

    def __post_init__(self) -> None:
        if self.first < 0 or self.count < 1 or self.end > MAX_HEADS:
            raise ValueError(f"{self.count} KV heads from {self.first} on")

    @property
    def end(self) -> int:
        """The head after the last one."""
        return self.first + self.count

    def contains(self, other: HeadRange) -> bool:
        """Whether all heads of `other` are in this range."""
        return self.first <= other.first and other.end <= self.end

    def relative_to(self, outer: HeadRange) -> HeadRange:
        """The range as seen from the first head of `outer`, which contains it."""
        return HeadRange(self.first - outer.first, self.count)

    def share(self, payload: memoryview, num_heads: int) -> memoryview:
        """This range's part of `payload`, which holds `num_heads`. Raises BlockInvalid when it is not in there."""
        size, rest = divmod(len(payload), num_heads)
        if rest or self.end > num_heads:
            raise BlockInvalid("heads")
        return payload[self.first * size : self.end * size]
