"""Which kvstore node a worker pushes to: one on its own host, else by rendezvous hashing over the living nodes. Pure.

A node that came after others, or came back, has a small weight that grows to the full one in the ramp's time, or in as
much time as it came after the oldest if that is less: those that start together need no ramp. One on this host is
preferred only as far as its weight says, so that a young node is not met by everybody's blocks at once.

A node that repeatedly failed is left, before its lease ends, until a probe finds it alive or it starts anew; each time
it fails again soon, the first probe comes later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.common.registry import LocationRecord
from services.common.rendezvous import draw, ramp_weight, ranking
from services.worker.engine_messages import PushTarget

NO_TARGET = PushTarget("", 0, "", "")
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
# Going well for so long makes the next failure a first one.
_FORGIVEN_AFTER_S = 60.0


@dataclass(slots=True)
class _Trouble:
    """A node that failed. returned_s: when it was found alive again, None while it is left."""

    epoch: int
    pause_s: float
    probe_s: float
    returned_s: float | None = None


class PushTargets:
    """Chooses for one worker. Times are wall time, as the records' are."""

    def __init__(self, *, worker_id: str, host: str, ramp_s: float) -> None:
        self._worker_id = worker_id
        self._host = host
        self._ramp_s = ramp_s
        self._trouble: dict[str, _Trouble] = {}

    def choose(self, records: Iterable[LocationRecord], now_s: float) -> PushTarget:
        """The node to push to, NO_TARGET when none is alive. `records` are all that is known."""
        nodes = {record.id: record for record in records if record.kind == "kvstore"}
        self._forget(nodes)
        since_s = {name: self._since_s(node) for name, node in nodes.items() if not self._is_left(name)}
        if not since_s:
            return NO_TARGET
        oldest_s = min(since_s.values())
        weights = {
            name: ramp_weight(now_s - one_s, min(self._ramp_s, one_s - oldest_s)) for name, one_s in since_s.items()
        }
        best = nodes[ranking(self._worker_id.encode(), self._near(nodes, weights))[0]]
        return PushTarget(best.id, best.epoch, best.pull_address, best.transfer_grpc_address or best.grpc_address)

    def leave(self, location_id: str, epoch: int, now_s: float) -> bool:
        """The node failed repeatedly. False when it was left before."""
        known = self._trouble.get(location_id)
        if known is not None and known.epoch >= epoch and known.returned_s is None:
            return False
        again = known is not None and known.returned_s is not None and now_s - known.returned_s < _FORGIVEN_AFTER_S
        pause_s = min(MAX_PAUSE_S, 2 * known.pause_s) if known is not None and again else FIRST_PAUSE_S
        self._trouble[location_id] = _Trouble(epoch, pause_s, now_s + pause_s)
        return True

    def due(self, records: Iterable[LocationRecord], now_s: float) -> list[LocationRecord]:
        """Nodes that are left and should be asked for a life sign now."""
        return [
            record
            for record in records
            if record.kind == "kvstore" and self._is_left(record.id) and self._trouble[record.id].probe_s <= now_s
        ]

    def probed(self, record: LocationRecord, now_s: float, *, alive: bool) -> None:
        """The answer of a probe: it is back, or is asked again after a pause."""
        known = self._trouble.get(record.id)
        if known is None or known.epoch != record.epoch:
            return
        if alive:
            known.returned_s = now_s
        else:
            known.probe_s = now_s + FIRST_PAUSE_S

    def _near(self, nodes: dict[str, LocationRecord], weights: dict[str, float]) -> dict[str, float]:
        """The weights of those on this host, or of the others while the former are young beside them."""
        near = {name: weight for name, weight in weights.items() if nodes[name].host == self._host}
        far = {name: weight for name, weight in weights.items() if name not in near}
        if not near or not far:
            return weights
        share = max(near.values()) / max(weights.values())
        return near if draw(self._worker_id.encode(), f"host {self._host}") < share else far

    def _since_s(self, node: LocationRecord) -> float:
        """When the node came, or came back."""
        known = self._trouble.get(node.id)
        returned_s = known.returned_s if known is not None else None
        return max(float(node.started_s), returned_s or 0.0)

    def _is_left(self, name: str) -> bool:
        known = self._trouble.get(name)
        return known is not None and known.returned_s is None

    def _forget(self, nodes: dict[str, LocationRecord]) -> None:
        """What is known of nodes that have gone or started anew."""
        gone = [name for name, known in self._trouble.items() if name not in nodes or nodes[name].epoch != known.epoch]
        for name in gone:
            del self._trouble[name]
