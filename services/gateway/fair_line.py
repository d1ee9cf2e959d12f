"""Where requests wait for a worker: one fair queue for each model, and a few asks to the router at a time.

A ticket waits, asks, is granted, and is left; it goes back to the front of its tenant's line when its ask or its
worker came to nothing. When the router finds every worker full for a class, neither that class nor a less urgent one
asks until a request of the model ends at this gateway, or a timer that backs off fires: room is also made by other
gateways' requests. The first ask after that goes alone, and each grant lets one more go at a time. Waiting is bounded
in number, in all and for a tenant, and in time; who would wait in vain for the time that its objective leaves is
refused at once. What is refused is told how long the queue takes to drain, as it did whenever somebody waited.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable

from services.common.fair_queue import Entry, FairQueue, RequestClass, displaced
from services.common.virtual_counters import TokenPrices
from services.gateway.errors import GatewayError, ObjectiveUnmet, Overloaded, TenantLimitExceeded
from services.gateway.lane import MIN_RETRY_AFTER_S, Lane
from services.gateway.output_forecast import OutputForecast
from services.gateway.tickets import LineLimits, Ticket, TicketState, Wanted

# A worker's answer that it is full reaches the router with its next report; until then the ask may go there again.
_QUICK_RETURNS = 2
_PRICES = TokenPrices()

# Told of every refusal: reason and class.
OnRefusal = Callable[[str, RequestClass], None]


class FairLine:
    """Owner of all tickets; each is given back by `leave`, however its request ended."""

    def __init__(self, limits: LineLimits, weight_of: Callable[[str], float], on_refusal: OnRefusal) -> None:
        """weight_of: a tenant's share against others, above 0."""
        self.outputs = OutputForecast()
        # Cleared by whoever looks at what waits.
        self.somebody_waits = asyncio.Event()
        self._limits = limits
        self._weight_of = weight_of
        self._on_refusal = on_refusal
        self._lanes: dict[str, Lane] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that wait, of all models."""
        return sum(lane.queue.num_waiting for lane in self._lanes.values())

    @property
    def num_asking(self) -> int:
        """Asks in flight; 0 when idle."""
        return sum(lane.num_asking for lane in self._lanes.values())

    def join(self, wanted: Wanted) -> Ticket:
        """Take a place.

        Raises TenantLimitExceeded or Overloaded when the tenant's, or all, are taken, and ObjectiveUnmet when its turn
        would come too late.
        """
        lane = self._lanes.get(wanted.model)
        if lane is None:
            queue: FairQueue[Ticket] = FairQueue(self._weight_of, self._limits.starvation)
            lane = self._lanes[wanted.model] = Lane(queue)
        ticket = Ticket(wanted, self._end_of_wait(wanted))
        ticket.entry = Entry(ticket, wanted.tenant, wanted.request_class, self._estimate(wanted))
        self._refuse_hopeless(ticket, lane)
        self._make_room(ticket, lane)
        lane.queue.push(ticket.entry, time.monotonic())
        self._dispatch(lane)
        return ticket

    async def turn(self, ticket: Ticket) -> None:
        """Wait until this ticket may ask. Raises GatewayError when it may no longer.

        The place is kept, also when cancelled: the caller leaves.
        """
        while ticket.state is not TicketState.ASKING:
            if ticket.refusal is not None:
                raise ticket.refusal
            left_s = ticket.until_s - time.monotonic()
            if left_s <= 0:
                raise self._too_late(ticket)
            ticket.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await ticket.changed.wait()

    def granted(self, ticket: Ticket, predicted_ttft_s: float = 0.0) -> None:
        """The router has named a worker. predicted_ttft_s: from now to the first token."""
        lane = self._lanes[ticket.wanted.model]
        ticket.state = TicketState.GRANTED
        lane.granted(ticket, predicted_ttft_s, time.monotonic())
        self._dispatch(lane)

    def full(self, ticket: Ticket, retry_after_s: float | None, room_in_s: float = 0.0) -> None:
        """The router has found every worker full. room_in_s: when it expects that to end, 0: unknown."""
        lane = self._lanes[ticket.wanted.model]
        ticket.retry_after_s = retry_after_s or ticket.retry_after_s
        lane.block(ticket.asks_as, room_in_s, functools.partial(self._retry, lane))
        self._return(ticket, lane)

    def again(self, ticket: Ticket, *, is_accepted: bool) -> None:
        """The granted worker has not taken the request or has failed: it goes back to the front of its line.

        is_accepted: a worker had taken it, so it neither makes room for others nor has to meet its objective any more.
        """
        lane = self._lanes[ticket.wanted.model]
        now_s = time.monotonic()
        if is_accepted:
            ticket.entry.is_kept = True
            ticket.until_s = self._end_of_kept_wait(ticket)
        ticket.returns += 1
        lane.drain.add(-ticket.entry.charged, now_s)
        if ticket.returns > _QUICK_RETURNS:
            self.full(ticket, None)
        else:
            self._return(ticket, lane)

    def set_aside(self, ticket: Ticket) -> None:
        """There is no worker for the request, whatever its room: it waits outside the line, in nobody's way."""
        lane = self._lanes[ticket.wanted.model]
        lane.num_asking -= 1
        lane.queue.give_up(ticket.entry)
        ticket.state = TicketState.ASIDE
        self._dispatch(lane)

    def bring_back(self, ticket: Ticket) -> None:
        """One that was set aside waits for a turn again, at the front.

        Only work that a worker had taken is set aside: its wait begins anew, whatever it waited for in nobody's way.
        """
        ticket.until_s = self._end_of_kept_wait(ticket)
        self._return(ticket, self._lanes[ticket.wanted.model])

    def leave(self, ticket: Ticket, *, cached_tokens: int = 0, output_tokens: int | None = None) -> None:
        """The request has ended; its tenant is charged what was computed. Idempotent.

        output_tokens: None when no worker had taken it.
        """
        lane = self._lanes[ticket.wanted.model]
        state, ticket.state = ticket.state, TicketState.LEFT
        if state is TicketState.WAITING and ticket.refusal is None:
            lane.queue.remove(ticket.entry)
            self._note_waiting(lane)
        elif state is TicketState.ASKING:
            lane.num_asking -= 1
            lane.queue.give_up(ticket.entry)
            self._dispatch(lane)
        elif state is TicketState.GRANTED:
            self._settle(ticket, lane, cached_tokens, output_tokens)

    def wake(self, model: str) -> None:
        """There may be room for `model`."""
        lane = self._lanes.get(model)
        if lane is not None and lane.timer is not None:
            self._retry(lane)

    def waiting_by_model(self) -> dict[str, tuple[int, int]]:
        """Requests that wait and their prompt tokens, of models that have any."""
        return {
            model: (lane.queue.num_waiting, sum(entry.item.wanted.prompt_tokens for entry in lane.queue))
            for model, lane in self._lanes.items()
            if lane.queue.num_waiting
        }

    def _dispatch(self, lane: Lane) -> None:
        """Let as many ask as may."""
        now_s = time.monotonic()
        while lane.num_asking < lane.max_asking:
            entry = lane.queue.pop(now_s, lane.blocked_from)
            if entry is None:
                break
            lane.num_asking += 1
            entry.item.state = TicketState.ASKING
            entry.item.changed.set()
        self._note_waiting(lane)

    def _note_waiting(self, lane: Lane) -> None:
        lane.drain.busy(lane.queue.num_waiting > 0, time.monotonic())
        if lane.queue.num_waiting:
            self.somebody_waits.set()

    def _return(self, ticket: Ticket, lane: Lane) -> None:
        if ticket.state is TicketState.ASKING:
            lane.num_asking -= 1
        ticket.state = TicketState.WAITING
        lane.queue.put_back(ticket.entry)
        self._dispatch(lane)

    def _retry(self, lane: Lane) -> None:
        lane.unblock()
        self._dispatch(lane)

    def _settle(self, ticket: Ticket, lane: Lane, cached_tokens: int, output_tokens: int | None) -> None:
        if output_tokens is None:
            lane.queue.give_up(ticket.entry)
            return
        wanted = ticket.wanted
        cost = _PRICES.cost(
            prompt_tokens=wanted.prompt_tokens, output_tokens=output_tokens, cached_tokens=cached_tokens
        )
        lane.queue.settle(ticket.entry, cost)
        self.outputs.learn(wanted.tenant, output_tokens / wanted.num_choices)

    def _refuse_hopeless(self, ticket: Ticket, lane: Lane) -> None:
        late_s = lane.late_s(ticket.wanted, time.monotonic())
        if late_s:
            self._on_refusal("objective", ticket.wanted.request_class)
            retry_after_s = max(MIN_RETRY_AFTER_S, late_s)
            raise ObjectiveUnmet("the first token would come too late behind those that wait", None, retry_after_s)

    def _make_room(self, ticket: Ticket, lane: Lane) -> None:
        tenant = ticket.wanted.tenant
        queues = [other.queue for other in self._lanes.values()]
        if sum(queue.num_waiting_of(tenant) for queue in queues) >= self._limits.max_tenant_waiting:
            self._on_refusal("tenant_queue_full", ticket.wanted.request_class)
            raise TenantLimitExceeded(
                f"{self._limits.max_tenant_waiting} requests of this tenant are waiting", None, self._drain_s(lane)
            )
        victim = displaced(ticket.entry, lane.queue, queues, self._limits.max_waiting)
        if victim is None:
            return
        shed = victim.item
        shed_lane = self._lanes[shed.wanted.model]
        self._on_refusal("queue_full", shed.wanted.request_class)
        shed.refusal = Overloaded(
            f"{self._limits.max_waiting} requests are waiting", None, shed.retry_after_s or self._drain_s(shed_lane)
        )
        if shed is ticket:
            raise shed.refusal
        shed_lane.queue.remove(victim)
        self._note_waiting(shed_lane)
        shed.changed.set()

    def _too_late(self, ticket: Ticket) -> GatewayError:
        wanted = ticket.wanted
        retry_after_s = ticket.retry_after_s or self._drain_s(self._lanes[wanted.model])
        if ticket.until_s == wanted.ttft_at_s and not ticket.entry.is_kept:
            self._on_refusal("objective", wanted.request_class)
            return ObjectiveUnmet("no worker could give the first token in time", None, retry_after_s)
        self._on_refusal("wait", wanted.request_class)
        return Overloaded("no worker had room in time", None, retry_after_s)

    def _drain_s(self, lane: Lane) -> float:
        return lane.retry_after_s(self._limits.max_wait_s, time.monotonic())

    def _end_of_wait(self, wanted: Wanted) -> float:
        return min(time.monotonic() + self._limits.max_wait_s, wanted.deadline_at_s, wanted.ttft_at_s)

    def _end_of_kept_wait(self, ticket: Ticket) -> float:
        return min(time.monotonic() + self._limits.max_wait_s, ticket.wanted.deadline_at_s)

    def _estimate(self, wanted: Wanted) -> float:
        output = self.outputs.tokens(wanted.tenant, wanted.max_tokens) * wanted.num_choices
        return _PRICES.cost(prompt_tokens=wanted.prompt_tokens, output_tokens=output)
