"""The Route stream: failover, silence, asks asked again."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from kvmesh.v1.router_pb2 import Ask, Grant

from services.gateway.errors import DeadlineExceeded, Overloaded
from services.gateway.router_client import RouterClient
from tests.gateway.fakes import SECRET, FakeRouter
from tests.support.waiting import SOON_S, eventually


@asynccontextmanager
async def routed(*routers: FakeRouter, ask_timeout_s: float = 30.0) -> AsyncIterator[RouterClient]:
    addresses = [await router.start() for router in routers]
    client = RouterClient(addresses, SECRET, ask_timeout_s=ask_timeout_s, silence_s=0.3)
    task = asyncio.create_task(client.run())
    try:
        yield client
        assert client.num_pending == 0
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await client.close()
        for router in routers:
            await router.server.stop(0)


def ask(client: RouterClient, name: str, life_s: float = 60.0) -> asyncio.Task[Grant]:
    message = Ask(request_id=name, attempt=1, model="m")
    return asyncio.create_task(client.ask(message, time.monotonic() + life_s))


def a_router() -> FakeRouter:
    return FakeRouter(workers={"w": "127.0.0.1:9"})


async def test_dead_router_is_replaced_within_a_second() -> None:
    first, second = a_router(), a_router()
    async with routed(first, second) as client:
        await ask(client, "a")
        first.mute = True
        waiting = [ask(client, f"b{i}") for i in range(20)]
        await eventually(lambda: len(first.asks) == 21)
        started_s = time.monotonic()
        await first.server.stop(0)
        await asyncio.gather(*waiting)
        assert time.monotonic() - started_s < SOON_S
        assert {message.request_id for message in second.asks} == {f"b{i}" for i in range(20)}


async def test_silent_router_is_left_within_a_second() -> None:
    first, second = a_router(), a_router()
    first.mute = True
    async with routed(first, second) as client:
        started_s = time.monotonic()
        await ask(client, "a")
        assert time.monotonic() - started_s < SOON_S
        assert [message.request_id for message in first.asks] == ["a"]


async def test_no_answer_is_overloaded_and_deadlines_hold() -> None:
    router = a_router()
    router.mute = True
    async with routed(router, ask_timeout_s=0.3) as client:
        with pytest.raises(Overloaded):
            await ask(client, "a")
        with pytest.raises(DeadlineExceeded):
            await ask(client, "b", life_s=0.1)


async def test_cancelled_ask_is_forgotten_and_its_grant_given_back() -> None:
    router = a_router()
    async with routed(router) as client:
        await ask(client, "warm")
        task = ask(client, "a")
        await asyncio.sleep(0)
        task.cancel()
        await eventually(lambda: any(done.request_id == "a" for done in router.dones))


async def test_every_grant_is_used_or_given_back_whenever_the_ask_is_cancelled() -> None:
    router, draw = a_router(), random.Random(1)
    async with routed(router) as client:
        await ask(client, "warm")
        tasks = []
        for i in range(400):
            tasks.append(ask(client, f"a{i}"))
            await asyncio.sleep(0)
            if i % 20 == 19:
                await asyncio.sleep(draw.random() * 0.004)
                for task in tasks[-20:]:
                    task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        used = sum(isinstance(result, Grant) for result in results)
        await eventually(lambda: len(router.asks) == len(router.dones) + used + 1)
