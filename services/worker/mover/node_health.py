"""Which kvstore nodes fail, by what pulls and pushes meet. Pure; time comes in as an argument.

A node that was lost once gets no pushes for a moment, after a second time no pulls either: it costs drops and
recomputation instead of a wait each. After a few in a row the front is told, which leaves it for another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from services.worker.mover_messages import NodeFailing

REST_S = 1.0
FAILURES_UNTIL_LEFT = 3
_MAX_NODES = 256


@dataclass(slots=True)
class _Node:
    """failures: in a row."""

    failures: int = 0
    rests_until_s: float = 0.0


class NodeHealth:
    """Of nodes by (id, epoch); only those that failed lately are remembered."""

    def __init__(self, failing: Callable[[NodeFailing], None]) -> None:
        self._failing = failing
        self._nodes: OrderedDict[tuple[str, int], _Node] = OrderedDict()

    def worked(self, location_id: str, epoch: int) -> None:
        """The node answered."""
        self._nodes.pop((location_id, epoch), None)

    def failed(self, location_id: str, epoch: int, now_s: float) -> None:
        """The node was lost, or did not answer in time."""
        node = self._nodes.setdefault((location_id, epoch), _Node())
        self._nodes.move_to_end((location_id, epoch))
        node.failures += 1
        node.rests_until_s = now_s + REST_S
        if node.failures >= FAILURES_UNTIL_LEFT:
            self._failing(NodeFailing(location_id, epoch))
        if len(self._nodes) > _MAX_NODES:
            self._nodes.popitem(last=False)

    def rests(self, location_id: str, epoch: int, now_s: float, *, after: int = 1) -> bool:
        """Whether the node is left alone now, having failed at least `after` times in a row."""
        node = self._nodes.get((location_id, epoch))
        return node is not None and node.failures >= after and now_s < node.rests_until_s
