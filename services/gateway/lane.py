"""The fair line of one model: its queue, its asks in flight, and what is known of its workers' room.

Time comes in as an argument: monotonic seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from services.common.drain_rate import BusyDrain
from services.common.fair_queue import FairQueue, RequestClass
from services.gateway.tickets import Ticket, Wanted

MAX_ASKS = 16
_LEAST_RETRY_S = 0.01
_FIRST_RETRY_S = 0.05
_LAST_RETRY_S = 0.4
MIN_RETRY_AFTER_S = 1.0
_NEWEST_SHARE = 0.1
_NO_CLASS_BLOCKED = RequestClass.BATCH + 1


@dataclass(slots=True, eq=False)
class Lane:
    """State of one model. first_token_s: mean time from a grant to the first token, as predicted.

    blocked_from: the most urgent class that does not ask until `timer` fires, nor does any behind it.
    """

    queue: FairQueue[Ticket]
    drain: BusyDrain = field(default_factory=BusyDrain)
    num_asking: int = 0
    max_asking: int = MAX_ASKS
    blocked_from: int = _NO_CLASS_BLOCKED
    pause_s: float = _FIRST_RETRY_S
    timer: asyncio.TimerHandle | None = None
    first_token_s: float = 0.0

    def granted(self, ticket: Ticket, predicted_ttft_s: float, now_s: float) -> None:
        """A worker had room for an asker: one more may ask at a time."""
        self.queue.take(ticket.entry)
        self.num_asking -= 1
        self.drain.add(ticket.entry.charged, now_s)
        self.first_token_s += _NEWEST_SHARE * (predicted_ttft_s - self.first_token_s)
        self.max_asking = min(MAX_ASKS, self.max_asking + 1)
        self.pause_s = _FIRST_RETRY_S

    def block(self, asked_as: RequestClass, room_in_s: float, retry: Callable[[], None]) -> None:
        """No worker had room for a class: it waits until `retry` is called, after a pause that doubles each time.

        A more urgent one does not wait for as long as those before it have come to. room_in_s: a forecast that shortens
        the pause, 0 for none.
        """
        self.max_asking = 1
        if asked_as < self.blocked_from and self.timer is not None:
            self.timer.cancel()
            self.timer, self.pause_s = None, _FIRST_RETRY_S
        self.blocked_from = min(self.blocked_from, asked_as)
        if self.timer is None:
            pause_s = max(_LEAST_RETRY_S, min(room_in_s or self.pause_s, self.pause_s))
            self.timer = asyncio.get_running_loop().call_later(pause_s, retry)
            self.pause_s = min(_LAST_RETRY_S, 2 * self.pause_s)

    def unblock(self) -> None:
        """Every class may ask."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer, self.blocked_from = None, _NO_CLASS_BLOCKED

    def late_s(self, wanted: Wanted, now_s: float) -> float:
        """By how much a comer's first token would miss its objective behind those that wait; 0 where it would not."""
        if not self.queue.num_waiting:
            return 0.0
        ahead = self.queue.cost_ahead(wanted.tenant, wanted.request_class)
        first_token_at_s = now_s + (self.drain.forecast_s(ahead, now_s) or 0.0) + self.first_token_s
        return max(0.0, first_token_at_s - wanted.ttft_at_s)

    def retry_after_s(self, max_wait_s: float, now_s: float) -> float:
        """When a comer would find the queue empty, as it is drained now; at most max_wait_s, half of it if unknown."""
        drain_s = self.drain.forecast_s(self.queue.cost_waiting, now_s)
        if drain_s is None:
            return max_wait_s / 2
        return min(max_wait_s, max(MIN_RETRY_AFTER_S, drain_s))
