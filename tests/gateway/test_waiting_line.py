"""The line of requests that no worker has room for: order, bounds, and that every place is given back."""

from __future__ import annotations

import asyncio
import time

import pytest

from services.gateway.errors import Overloaded
from services.gateway.waiting_line import Ticket, WaitingLine


def far() -> float:
    return time.monotonic() + 60


async def served(line: WaitingLine, ticket: Ticket, order: list[Ticket]) -> None:
    await line.turn(ticket, far())
    order.append(ticket)
    line.leave(ticket)


async def test_the_urgent_overtake_and_the_rest_keep_their_order() -> None:
    line = WaitingLine(max_waiting=10, max_wait_s=30)
    batch, first, second, interactive = (line.join("m", priority) for priority in (3, 0, 2, 1))
    order: list[Ticket] = []
    async with asyncio.timeout(5):
        await asyncio.gather(*(served(line, ticket, order) for ticket in (batch, first, second, interactive)))
    assert order == [interactive, first, second, batch]
    assert line.num_waiting == 0


async def test_the_first_is_woken_before_its_retry_and_keeps_its_place() -> None:
    line = WaitingLine(max_waiting=10, max_wait_s=30)
    ticket, other = line.join("m", 0), line.join("m", 0)
    for _ in range(6):
        await line.turn(ticket, far())
    waiting = asyncio.create_task(line.turn(ticket, far()))
    await asyncio.sleep(0)
    line.wake("m")
    async with asyncio.timeout(0.2):
        await waiting
    assert line.num_waiting == 2
    line.leave(other)
    line.leave(ticket)
    line.leave(ticket)
    assert not line.has("m")


async def test_one_who_is_overtaken_while_it_pauses_waits_again() -> None:
    line = WaitingLine(max_waiting=10, max_wait_s=30)
    batch = line.join("m", 3)
    order: list[Ticket] = []
    pausing = asyncio.create_task(served(line, batch, order))
    await asyncio.sleep(0)
    urgent = line.join("m", 1)
    await served(line, urgent, order)
    await pausing
    assert order == [urgent, batch]


async def test_models_do_not_wait_for_each_other() -> None:
    line = WaitingLine(max_waiting=10, max_wait_s=30)
    line.join("busy", 0)
    async with asyncio.timeout(5):
        await line.turn(line.join("idle", 0), far())


async def test_the_line_is_bounded_in_length_and_time() -> None:
    line = WaitingLine(max_waiting=2, max_wait_s=0.1)
    first, second = line.join("m", 0), line.join("m", 0)
    with pytest.raises(Overloaded, match="2 requests are waiting"):
        line.join("n", 0)
    with pytest.raises(Overloaded, match="no worker had room"):
        await line.turn(second, far())
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="no worker had room"):
        await line.turn(first, far())
    line.leave(first)
    line.leave(second)
    assert line.num_waiting == 0


async def test_a_request_s_own_deadline_ends_its_wait() -> None:
    line = WaitingLine(max_waiting=2, max_wait_s=30)
    line.join("m", 0)
    with pytest.raises(Overloaded):
        await line.turn(line.join("m", 0), time.monotonic() + 0.05)


async def test_a_place_in_the_middle_can_be_given_up() -> None:
    line = WaitingLine(max_waiting=10, max_wait_s=30)
    tickets = [line.join("m", 0) for _ in range(5)]
    order: list[Ticket] = []
    tasks = [asyncio.create_task(served(line, ticket, order)) for ticket in tickets[:2] + tickets[3:]]
    line.leave(tickets[2])
    async with asyncio.timeout(5):
        await asyncio.gather(*tasks)
    assert order == tickets[:2] + tickets[3:]
