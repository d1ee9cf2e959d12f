"""Several routers' tables over a real Valkey: they agree, and what a Redis lost comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from services.common.redis_client import RedisClient, connect_redis
from services.router.control.follower import ControlFollower
from services.router.control.table import KEEP_US, ControlTable, Entry
from services.router.errors import RedisSilentError
from tests.support.valkey import Valkey
from tests.support.waiting import SOON_S, eventually


@dataclass
class Router:
    follower: ControlFollower
    epochs: dict[str, int]

    @property
    def table(self) -> ControlTable:
        return self.follower.table

    async def drain(self, worker_id: str, epoch: int) -> None:
        await self.follower.change(f"worker/{worker_id}", lambda _: b'{"epoch":%d}' % epoch)


@asynccontextmanager
async def router(url: str) -> AsyncIterator[Router]:
    client: RedisClient = connect_redis(url)
    epochs: dict[str, int] = {}
    follower = ControlFollower(client, ControlTable(), epochs=lambda: epochs, on_change=lambda: None)
    task = asyncio.create_task(follower.run())
    try:
        yield Router(follower, epochs)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.aclose()


async def test_a_change_reaches_every_router_within_a_second(valkey: Valkey) -> None:
    async with router(valkey.url) as one, router(valkey.url) as two:
        await two.follower.synced.wait()
        await one.drain("w1", 5)
        assert one.table.drains == {"w1": 5}
        await eventually(lambda: two.table.drains == {"w1": 5}, timeout_s=SOON_S)
        await two.drain("w1", 0)
        await eventually(lambda: one.table.drains == {}, timeout_s=SOON_S)


async def test_simultaneous_changes_of_one_entry_are_all_made(valkey: Valkey) -> None:
    def append(payload: bytes | None) -> bytes:
        number = len(payload or b"")
        return b"x" * (number + 1)

    async with router(valkey.url) as one, router(valkey.url) as two:
        for _ in range(10):
            await asyncio.gather(one.follower.change("other/k", append), two.follower.change("other/k", append))
        await eventually(lambda: one.table.entries == two.table.entries)
        assert len(one.table.entries["other/k"].payload) == 20


async def test_an_empty_redis_gets_back_the_newest_of_every_entry(valkey: Valkey) -> None:
    async with router(valkey.url) as one, router(valkey.url) as two:
        await one.drain("w1", 5)
        await one.drain("w2", 6)
        await eventually(lambda: len(two.table.drains) == 2)
        valkey.restart()
        async with router(valkey.url) as late:
            await eventually(lambda: late.table.drains == {"w1": 5, "w2": 6})
            await late.drain("w1", 0)
            await eventually(lambda: one.table.drains == two.table.drains == {"w2": 6})
        assert one.table.entries == two.table.entries


async def test_an_operation_right_after_the_loss_changes_what_was_known(valkey: Valkey) -> None:
    async with router(valkey.url) as one:
        await one.follower.change("other/k", lambda _: b"before")
        valkey.restart()
        seen: list[bytes | None] = []

        def edit(payload: bytes | None) -> bytes:
            seen.append(payload)
            return b"after"

        await one.follower.change("other/k", edit)
        assert set(seen) == {b"before"}
        assert one.table.entries["other/k"].payload == b"after"


async def test_without_redis_what_was_known_applies_and_changes_are_refused(valkey: Valkey) -> None:
    async with router(valkey.url) as one:
        await one.drain("w1", 5)
        valkey.kill()
        with pytest.raises(RedisSilentError, match="redis does not answer"):
            await one.drain("w1", 0)
        assert one.table.drains == {"w1": 5}


def test_what_says_nothing_any_more_is_forgotten_after_a_day() -> None:
    table = ControlTable()
    drained, undrained = Entry(100, b'{"epoch":5}'), Entry(100, b'{"epoch":0}')
    table.replace({"worker/here": drained, "worker/gone": drained, "worker/anew": drained, "worker/free": undrained})
    epochs = {"here": 5, "anew": 6, "free": 7}
    assert table.over(epochs, 100 + KEEP_US - 1) == {}
    over = table.over(epochs, 100 + KEEP_US)
    assert over == {"worker/gone": 100, "worker/anew": 100, "worker/free": 100}
    assert set(table.beyond({}, epochs, 100 + KEEP_US)) == {"worker/here"}


def test_an_entry_that_cannot_be_read_is_kept_and_does_not_apply() -> None:
    table = ControlTable()
    table.replace({"model/m": Entry(1, b'{"versions": 3}'), "worker/w": Entry(1, b"[]"), "later/x": Entry(1, b"?")})
    assert (table.models, table.drains) == ({}, {})
    assert len(table.entries) == 3
