"""Where requests wait while no worker can take them: one line for each model, in order of priority and arrival.

Only the first of a line asks the router; it is woken when a request of its model ends at this gateway, and by a timer
that backs off, since room is also made by other gateways' requests. Whoever comes while others wait joins behind them.
The line is bounded in length and in time.
"""

from __future__ import annotations

import asyncio
import bisect
import time
from dataclasses import dataclass, field

from kvmesh.v1.common_pb2 import PRIORITY_CLASS_STANDARD

from services.gateway.errors import Overloaded

_FIRST_RETRY_S = 0.05
_LAST_RETRY_S = 0.4


@dataclass(slots=True, eq=False)
class Ticket:
    """A place in a line. until_s: monotonic. retry_after_s: what its caller is told should its wait be in vain."""

    model: str
    order: tuple[int, int]
    until_s: float
    retry_after_s: float
    tries: int = 0
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class WaitingLine:
    """Owner of all places; a ticket is given back by `leave`, however its wait ended."""

    def __init__(self, *, max_waiting: int, max_wait_s: float) -> None:
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._lines: dict[str, list[Ticket]] = {}
        self._arrivals = 0

    @property
    def num_waiting(self) -> int:
        """Requests in all lines."""
        return sum(map(len, self._lines.values()))

    def has(self, model: str) -> bool:
        """Whether anybody waits for `model`."""
        return model in self._lines

    def join(self, model: str, priority: int) -> Ticket:
        """Take a place behind everybody of the same or a more urgent class. Raises Overloaded when all are taken."""
        if self.num_waiting >= self._max_waiting:
            raise Overloaded(f"{self._max_waiting} requests are waiting", None, self._max_wait_s / 2)
        self._arrivals += 1
        order = (priority or PRIORITY_CLASS_STANDARD, self._arrivals)
        ticket = Ticket(model, order, time.monotonic() + self._max_wait_s, self._max_wait_s / 2)
        bisect.insort(self._lines.setdefault(model, []), ticket, key=lambda other: other.order)
        return ticket

    async def turn(self, ticket: Ticket, deadline_at_s: float) -> None:
        """Wait until this ticket may ask. Raises Overloaded when its time in the line is over.

        The place is kept, also when cancelled: the caller leaves.
        """
        limit_s = min(ticket.until_s, deadline_at_s)
        pause_s = min(_LAST_RETRY_S, _FIRST_RETRY_S * 2**ticket.tries)
        retry_at_s = min(limit_s, time.monotonic() + pause_s)
        while True:
            if self._is_first(ticket):
                await _woken(ticket, retry_at_s)
                # Somebody more urgent may have come meanwhile.
                if self._is_first(ticket):
                    break
            else:
                # A wake that came before somebody more urgent was meant for the first.
                ticket.woken.clear()
                if not await _woken(ticket, limit_s):
                    break
        ticket.woken.clear()
        ticket.tries += 1
        if time.monotonic() >= limit_s:
            raise Overloaded("no worker had room in time", None, ticket.retry_after_s)

    def leave(self, ticket: Ticket) -> None:
        """Give the place back; the next one's turn has come. Idempotent."""
        line = self._lines.get(ticket.model, [])
        if ticket not in line:
            return
        line.remove(ticket)
        if not line:
            del self._lines[ticket.model]
        self.wake(ticket.model)

    def wake(self, model: str) -> None:
        """There may be room for `model`."""
        line = self._lines.get(model)
        if line:
            line[0].woken.set()

    def _is_first(self, ticket: Ticket) -> bool:
        line = self._lines.get(ticket.model, [ticket])
        return line[0] is ticket


async def _woken(ticket: Ticket, until_s: float) -> bool:
    """Whether the ticket was woken before `until_s`."""
    try:
        async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
            await ticket.woken.wait()
    except TimeoutError:
        return False
    return True
