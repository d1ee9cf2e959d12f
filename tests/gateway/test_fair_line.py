"""The line of requests on their way to a worker: turns, bounds in number and time, shedding, waking, and that every
place is given back.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.fair_queue import FairQueue, RequestClass, StarvationBound
from services.gateway.errors import ObjectiveUnmet, Overloaded, TenantLimitExceeded
from services.gateway.fair_line import FairLine
from services.gateway.lane import MAX_ASKS, Lane
from services.gateway.tickets import LineLimits, Ticket, TicketState, Wanted
from tests.support.waiting import eventually

INTERACTIVE, STANDARD, BATCH = RequestClass
LIMITS = LineLimits(max_waiting=100, max_tenant_waiting=50, max_wait_s=30, starvation=StarvationBound())


class Lines:
    """A line, its refusals, and short ways to use it."""

    def __init__(self, **limits: object) -> None:
        self.refusals: list[tuple[str, RequestClass]] = []
        self.line = FairLine(
            replace(LIMITS, **limits),  # type: ignore[arg-type]
            lambda tenant: 1.0,
            lambda reason, kind: self.refusals.append((reason, kind)),
        )

    def join(
        self, tenant: str = "a", kind: RequestClass = STANDARD, ttft_s: float = math.inf, model: str = "m"
    ) -> Ticket:
        now_s = time.monotonic()
        return self.line.join(Wanted(model, tenant, kind, 100, 10, 1, now_s + 60, now_s + ttft_s))

    def block(self, kind: RequestClass = INTERACTIVE) -> Ticket:
        """Have the router refuse a request, so that others of its class wait."""
        ticket = self.join("blocker", kind)
        self.line.full(ticket, None)
        return ticket

    def assert_idle(self) -> None:
        assert (self.line.num_waiting, self.line.num_asking) == (0, 0)


async def asked(line: FairLine, ticket: Ticket) -> Ticket:
    async with asyncio.timeout(60):
        await line.turn(ticket)
    return ticket


async def test_on_an_idle_mesh_everybody_asks_at_once_and_a_few_at_a_time() -> None:
    lines = Lines()
    tickets = [lines.join() for _ in range(MAX_ASKS + 1)]
    assert [ticket.state for ticket in tickets] == [TicketState.ASKING] * MAX_ASKS + [TicketState.WAITING]
    await asked(lines.line, tickets[0])
    lines.line.granted(tickets[0])
    assert tickets[-1].state is TicketState.ASKING
    for ticket in tickets:
        lines.line.leave(ticket)
        lines.line.leave(ticket)
    lines.assert_idle()


async def test_when_full_one_asks_after_each_wake_and_grants_open_the_way() -> None:
    lines = Lines()
    first = lines.block()
    others = [lines.join(kind=INTERACTIVE) for _ in range(4)]
    assert {ticket.state for ticket in (first, *others)} == {TicketState.WAITING}
    lines.line.wake("m")
    assert [ticket.state for ticket in (first, *others)].count(TicketState.ASKING) == 1
    asking = next(ticket for ticket in (first, *others) if ticket.state is TicketState.ASKING)
    lines.line.granted(asking)
    assert lines.line.num_asking == 2
    for ticket in (first, *others):
        lines.line.leave(ticket)
    lines.assert_idle()


async def test_a_timer_wakes_when_nothing_ends_here() -> None:
    lines = Lines()
    ticket = lines.block()
    await asked(lines.line, ticket)
    lines.line.full(ticket, 2.5)
    await asked(lines.line, ticket)
    assert ticket.retry_after_s == 2.5
    lines.line.leave(ticket)


async def test_a_class_that_is_full_does_not_hold_up_a_more_urgent_one() -> None:
    lines = Lines()
    batch = lines.block(BATCH)
    assert lines.join(kind=BATCH).state is TicketState.WAITING
    urgent = lines.join(kind=INTERACTIVE)
    assert urgent.state is TicketState.ASKING
    lines.line.full(urgent, None)
    assert lines.join(kind=INTERACTIVE).state is TicketState.WAITING
    assert batch.state is TicketState.WAITING


async def test_a_more_urgent_class_does_not_wait_for_as_long_as_others_have_come_to() -> None:
    fired: list[bool] = []
    lane = Lane(FairQueue(lambda tenant: 1.0, StarvationBound()))
    for _ in range(8):
        lane.block(BATCH, 0.0, lambda: fired.append(True))
        lane.unblock()
    lane.block(BATCH, 0.0, lambda: fired.append(True))
    of_batch, pause_s = lane.timer, lane.pause_s
    assert of_batch is not None
    lane.block(INTERACTIVE, 0.0, lambda: fired.append(True))
    assert lane.timer is not None
    assert of_batch.cancelled()
    assert lane.pause_s < pause_s
    of_all = lane.timer
    lane.block(BATCH, 0.0, lambda: fired.append(True))
    assert (lane.timer, lane.blocked_from) == (of_all, INTERACTIVE)
    await eventually(lambda: fired == [True])


async def test_models_do_not_wait_for_each_other() -> None:
    lines = Lines()
    lines.block()
    assert lines.join(model="other").state is TicketState.ASKING


async def test_a_worker_that_turns_out_full_is_asked_around_twice_and_then_waited_for() -> None:
    lines = Lines()
    ticket = lines.join()
    for _ in range(2):
        await asked(lines.line, ticket)
        lines.line.granted(ticket)
        lines.line.again(ticket, is_accepted=False)
        assert ticket.state is TicketState.ASKING
    lines.line.granted(ticket)
    lines.line.again(ticket, is_accepted=False)
    assert ticket.state is TicketState.WAITING
    await asked(lines.line, ticket)
    lines.line.leave(ticket)
    lines.assert_idle()


async def test_a_full_line_sheds_the_least_urgent_and_says_when_to_come_back() -> None:
    lines = Lines(max_waiting=3)
    lines.block()
    # On a busy machine it would fire in the middle of this.
    timer = lines.line._lanes["m"].timer
    assert timer is not None
    timer.cancel()
    batches = [lines.join(tenant, BATCH) for tenant in ("a", "b")]
    waits = [asyncio.create_task(asked(lines.line, ticket)) for ticket in batches]
    urgent = lines.join("c", INTERACTIVE)
    assert urgent.state is TicketState.WAITING
    shed = next(ticket for ticket in batches if ticket.refusal is not None)
    with pytest.raises(Overloaded, match="3 requests are waiting") as caught:
        await waits[batches.index(shed)]
    assert caught.value.retry_after_s is not None
    with pytest.raises(Overloaded):
        lines.join("d", BATCH)
    assert lines.refusals == [("queue_full", BATCH), ("queue_full", BATCH)]
    for ticket in (urgent, *batches):
        lines.line.leave(ticket)
    for wait in waits:
        wait.cancel()


async def test_a_tenant_may_only_keep_so_many_waiting() -> None:
    lines = Lines(max_tenant_waiting=2)
    lines.block()
    for _ in range(2):
        lines.join("noisy", INTERACTIVE)
    with pytest.raises(TenantLimitExceeded, match="2 requests of this tenant") as caught:
        lines.join("noisy", INTERACTIVE)
    assert caught.value.retry_after_s
    lines.join("quiet", INTERACTIVE)


async def test_a_wait_ends_at_the_objective_the_longest_wait_or_the_deadline() -> None:
    lines = Lines(max_wait_s=0.2)
    lines.block()
    with pytest.raises(ObjectiveUnmet):
        await lines.line.turn(lines.join(kind=INTERACTIVE, ttft_s=0.01))
    plain = lines.join(kind=INTERACTIVE)

    async def ask_for_ever() -> None:
        while True:
            await lines.line.turn(plain)
            lines.line.full(plain, None)

    with pytest.raises(Overloaded, match="no worker had room in time"):
        await ask_for_ever()
    assert [reason for reason, _ in lines.refusals] == ["objective", "wait"]


async def test_what_a_worker_had_accepted_is_neither_shed_nor_bound_to_its_objective() -> None:
    lines = Lines(max_waiting=2)
    accepted = lines.join(kind=BATCH, ttft_s=0.01)
    lines.line.granted(accepted)
    lines.block()
    lines.line.again(accepted, is_accepted=True)
    assert accepted.state is TicketState.WAITING
    assert accepted.until_s > time.monotonic() + 20
    with pytest.raises(Overloaded):
        lines.join(kind=INTERACTIVE)
    assert accepted.refusal is None


async def test_who_is_set_aside_is_in_nobodys_way_and_comes_back_first() -> None:
    lines = Lines()
    rescued = lines.join("b", STANDARD)
    lines.line.granted(rescued)
    lines.line.again(rescued, is_accepted=True)
    assert rescued.state is TicketState.ASKING
    lines.line.set_aside(rescued)
    assert (lines.line.num_waiting, lines.line.num_asking) == (0, 0)
    others = [lines.join("a", STANDARD) for _ in range(MAX_ASKS + 3)]
    assert others[MAX_ASKS].state is TicketState.WAITING
    lines.line.bring_back(rescued)
    lines.line.granted(others[0])
    assert rescued.state is TicketState.ASKING
    lines.line.set_aside(rescued)
    for ticket in (rescued, *others):
        lines.line.leave(ticket)
    lines.assert_idle()


async def test_who_comes_back_has_all_its_wait_before_it() -> None:
    """However long there was no worker: accepted work is not refused for that."""
    lines = Lines(max_wait_s=0.05)
    rescued = lines.join()
    lines.line.granted(rescued)
    lines.line.again(rescued, is_accepted=True)
    lines.line.set_aside(rescued)
    await eventually(lambda: time.monotonic() > rescued.until_s, timeout_s=20)
    blocker = lines.block()
    before_s = time.monotonic()
    lines.line.bring_back(rescued)
    assert rescued.state is TicketState.WAITING
    assert rescued.until_s >= before_s + 0.05
    for ticket in (rescued, blocker):
        lines.line.leave(ticket)
    lines.assert_idle()


async def test_the_forecast_is_the_queue_over_the_rate_of_grants_while_somebody_waits() -> None:
    lines = Lines(max_tenant_waiting=30)
    waiting = [lines.block(), *(lines.join("a", INTERACTIVE) for _ in range(30))]
    with pytest.raises(TenantLimitExceeded) as caught:
        lines.join("a", INTERACTIVE)
    assert caught.value.retry_after_s == 15.0, "nothing is known: half of the longest wait"
    for _ in range(10):
        lines.line.wake("m")
        asking = next(ticket for ticket in waiting if ticket.state is TicketState.ASKING)
        lines.line.granted(asking, predicted_ttft_s=1.0)
    with pytest.raises(ObjectiveUnmet, match="too late behind") as late:
        lines.join("a", INTERACTIVE, ttft_s=0.5)
    assert late.value.retry_after_s is not None
    assert late.value.retry_after_s >= 1.0
    assert lines.join("a", INTERACTIVE, ttft_s=30).state is TicketState.WAITING


async def test_who_waits_for_nobody_is_never_refused_for_its_objective() -> None:
    lines = Lines()
    ticket = lines.join()
    lines.line.granted(ticket, predicted_ttft_s=1e9)
    assert lines.join(ttft_s=0.1).state is TicketState.ASKING


async def test_tenants_are_charged_what_was_computed() -> None:
    lines = Lines()
    costs = {}
    for tenant, cached, output in (("cold", 0, 10), ("warm", 100, 10), ("gone", 0, None)):
        ticket = lines.join(tenant)
        lines.line.granted(ticket)
        lines.line.leave(ticket, cached_tokens=cached, output_tokens=output)
        costs[tenant] = ticket.entry.charged
    assert costs == {"cold": 120, "warm": 30, "gone": 0}


@settings(max_examples=60)
@given(steps=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 30), st.sampled_from(RequestClass)), max_size=60))
def test_whatever_happens_every_place_is_given_back(steps: list[tuple[int, int, RequestClass]]) -> None:
    """And when nobody is refused any more, everybody who waits gets to ask."""

    async def run() -> None:
        lines = Lines(max_waiting=8, max_tenant_waiting=6)
        tickets: list[Ticket] = []
        for action, pick, kind in steps:
            ticket = tickets[pick % len(tickets)] if tickets else None
            if action <= 1 or ticket is None:
                try:
                    tickets.append(lines.join("ab"[pick % 2], kind))
                except (Overloaded, TenantLimitExceeded):
                    continue
            elif action == 2 and ticket.state is TicketState.ASKING:
                lines.line.granted(ticket)
            elif action == 3 and ticket.state is TicketState.ASKING:
                lines.line.full(ticket, None)
            elif action == 4 and ticket.state is TicketState.GRANTED:
                lines.line.again(ticket, is_accepted=bool(pick % 2))
            elif action == 6 and ticket.state is TicketState.ASKING:
                lines.line.set_aside(ticket)
            elif action == 7 and ticket.state is TicketState.ASIDE:
                lines.line.bring_back(ticket)
            elif action == 5:
                lines.line.leave(ticket, output_tokens=3)
                tickets.remove(ticket)
        lines.line.wake("m")
        while asking := [ticket for ticket in tickets if ticket.state is TicketState.ASKING]:
            lines.line.granted(asking[0])
        assert lines.line.num_waiting == 0
        for ticket in tickets:
            lines.line.leave(ticket)
        lines.assert_idle()

    asyncio.run(run())
