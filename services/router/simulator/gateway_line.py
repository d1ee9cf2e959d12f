"""The line of a simulated gateway: who has found no room waits in the fair queue, and the first asks again. Pure.

Traces name no tenants: all are one tenant and one class.
"""

from __future__ import annotations

from collections.abc import Callable

from services.common.fair_queue import Entry, FairQueue, RequestClass, StarvationBound
from services.router.simulator.scenario import Outcome


class GatewayLine:
    """place: asks the router, False when there is no room yet. refuse: the end of one that has waited too long."""

    def __init__(
        self, patience_s: float, *, place: Callable[[Outcome], bool], refuse: Callable[[Outcome], None]
    ) -> None:
        self._patience_s = patience_s
        self._place = place
        self._refuse = refuse
        self._queue: FairQueue[Outcome] = FairQueue(lambda tenant: 1.0, StarvationBound())

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits."""
        return not self._queue.num_waiting

    def join(self, outcome: Outcome, now_s: float) -> None:
        """The last to wait."""
        cost = float(outcome.request.prompt_tokens)
        self._queue.push(Entry(outcome, "", RequestClass.STANDARD, cost), now_s)

    def serve(self, now_s: float) -> None:
        """The first asks; when it gets a place the next one's turn has come."""
        while (entry := self._queue.pop(now_s)) is not None:
            first = entry.item
            if now_s - first.arrived_s > self._patience_s and not first.output_tokens:
                self._refuse(first)
                self._queue.give_up(entry)
            elif self._place(first):
                self._queue.take(entry)
            else:
                self._queue.put_back(entry)
                return
