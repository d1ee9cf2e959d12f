"""Which chains are wanted so often that other nodes should have them too, and which nodes. Pure.

A block is hot when it was lent often enough within about a window; a chain's hot part is a prefix, because who wants a
block wants all before it. Its copies go to the nodes that the chain's first block prefers among all that live, at most
`nodes` of them: whoever holds the chain finds the same ones, so that copies of copies lead nowhere new. One node is
asked at a time, and the next only if the chain is still hot a window later.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.blocks import BlockId
from services.common.rendezvous import ranking

MAX_TRACKED = 65_536
# After so many windows a node may be asked again: it may have evicted its copy.
_FORGET_WINDOWS = 10


class Demand:
    """Counts leases by half windows; the present one and the one before count."""

    def __init__(self, *, leases: int, window_s: float) -> None:
        """leases: within `window_s`, from which a block is hot."""
        self._leases = leases
        self._half_s = window_s / 2
        self._present: dict[BlockId, int] = {}
        self._before: dict[BlockId, int] = {}
        self._half = 0

    def note(self, ids: Sequence[BlockId], now_s: float) -> int:
        """These blocks, in prefix order, are lent once more. Returns how many leading ones are hot now."""
        self._turn(now_s)
        present, before = self._present, self._before
        has_room = len(present) + len(ids) <= MAX_TRACKED
        num_hot = 0
        for index, block_id in enumerate(ids):
            count = present.get(block_id, 0) + 1
            if count > 1 or has_room:
                present[block_id] = count
            if num_hot == index and count + before.get(block_id, 0) >= self._leases:
                num_hot += 1
        return num_hot

    def __len__(self) -> int:
        """Blocks tracked."""
        return len(self._present) + len(self._before)

    def _turn(self, now_s: float) -> None:
        half = int(now_s // self._half_s)
        if half != self._half:
            self._before = self._present if half == self._half + 1 else {}
            self._present = {}
            self._half = half


@dataclass(slots=True)
class _Asked:
    """Of one chain: nodes asked, not before when the next, and when all is forgotten."""

    nodes: set[str] = field(default_factory=set)
    next_s: float = 0.0
    forget_s: float = 0.0


class CopyPlan:
    """Which node to ask next for a copy of a hot chain."""

    def __init__(self, own_id: str, *, nodes: int, window_s: float) -> None:
        self._own_id = own_id
        self._nodes = nodes
        self._window_s = window_s
        # Of every block that was to be copied; one object for each chain.
        self._asked: OrderedDict[BlockId, _Asked] = OrderedDict()

    def is_due(self, tip: BlockId, now_s: float) -> bool:
        """Whether a node could be asked for the chain that ends in `tip` now."""
        asked = self._asked.get(tip)
        return asked is None or now_s >= asked.next_s

    def next_node(self, first: BlockId, tip: BlockId, names: Sequence[str], now_s: float) -> str | None:
        """Whom to ask, of the living nodes `names`; None: everybody who should have it was asked."""
        asked = self._asked.get(tip)
        tried = asked.nodes if asked is not None and now_s < asked.forget_s else set()
        wanted = ranking(first, dict.fromkeys(names, 1.0))[: self._nodes]
        return next((name for name in wanted if name != self._own_id and name not in tried), None)

    def asked(self, path: Sequence[BlockId], node: str | None, now_s: float, *, tip: BlockId) -> None:
        """`node` was asked for the chain of these blocks; None: nobody is left to ask.

        tip: where the wanted chain ends, which may be longer than what is copied of it.
        """
        known = self._asked.get(path[-1])
        if known is None or now_s >= known.forget_s:
            known = _Asked(forget_s=now_s + _FORGET_WINDOWS * self._window_s)
        if node is not None:
            known.nodes.add(node)
        known.next_s = now_s + self._window_s
        for block_id in (*path, tip):
            self._asked[block_id] = known
            self._asked.move_to_end(block_id)
        while len(self._asked) > MAX_TRACKED:
            self._asked.popitem(last=False)
