"""Who shares requests out by health checks, and whether each of them has heard that this server takes no more.

A balancer asks after a service by name, over one connection, again and again. Supervisors ask after the server as a
whole: they send it no requests, and are not counted. A second question after a "no" shows that the first "no" has
been read. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

# A connection that asked nothing for so long belongs to nobody who balances by it.
FORGET_S = 4.0
_TOLD = 2


@dataclass(slots=True)
class _Balancer:
    asked_at_s: float
    refusals: int = 0


class Balancers:
    """Owner of what each connection was told. Times are monotonic."""

    def __init__(self) -> None:
        self._by_peer: dict[str, _Balancer] = {}

    def asked(self, peer: str, now_s: float, *, serving: bool) -> None:
        """A connection has asked after a service by name, and is told whether it serves."""
        self._forget(now_s)
        balancer = self._by_peer.setdefault(peer, _Balancer(now_s))
        balancer.asked_at_s = now_s
        balancer.refusals = 0 if serving else balancer.refusals + 1

    def num_untold(self, now_s: float) -> int:
        """Balancers that may still believe that the server takes requests."""
        self._forget(now_s)
        return sum(balancer.refusals < _TOLD for balancer in self._by_peer.values())

    def _forget(self, now_s: float) -> None:
        gone = [peer for peer, balancer in self._by_peer.items() if now_s - balancer.asked_at_s > FORGET_S]
        for peer in gone:
            del self._by_peer[peer]
