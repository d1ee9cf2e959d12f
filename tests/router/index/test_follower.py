"""Announcer and replica over a real Valkey: restarts, gaps, trimmed streams, epochs, leases."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

from services.common import announcer as announcer_module
from services.common.announcer import Announcer, Tier
from services.common.blocks import BlockId
from services.common.redis_client import RedisClient, connect_redis
from services.router.index import follower as follower_module
from services.router.index.follower import IndexFollower
from services.router.index.replica import Replica
from tests.router.index.contents import as_kept, held_by
from tests.support.valkey import Valkey
from tests.support.waiting import eventually


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "OVERVIEW_EVERY_S", 0.2)
    monkeypatch.setattr(follower_module, "EMPTY_OVERVIEW_EVERY_S", 1.0)
    monkeypatch.setattr(announcer_module, "RENEW_S", 0.3)


@pytest.fixture
async def client(valkey: Valkey) -> AsyncIterator[RedisClient]:
    client = connect_redis(valkey.url)
    yield client
    await client.aclose()


class Mesh:
    """Announcers and one follower, ended together."""

    def __init__(self, client: RedisClient) -> None:
        self.client = client
        self.replica = Replica()
        self.follower = IndexFollower(client, self.replica)
        self.tasks: list[asyncio.Task[None]] = []

    def follow(self) -> None:
        self.tasks.append(asyncio.create_task(self.follower.run()))

    def announcer(self, name: str = "w1", *, epoch: int = 1, run: bool = True) -> Announcer:
        announcer = Announcer(self.client, kind="worker", location_id=name, epoch=epoch)
        if run:
            self.tasks.append(asyncio.create_task(announcer.run()))
        return announcer

    def held(self, name: str = "w1") -> dict[BlockId, int] | None:
        return held_by(self.replica, f"worker/{name}")

    async def end(self, *, last: int = 0) -> None:
        ending, self.tasks = self.tasks[-last:], self.tasks[:-last] if last else []
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)


@pytest.fixture
async def mesh(client: RedisClient) -> AsyncIterator[Mesh]:
    mesh = Mesh(client)
    yield mesh
    await mesh.end()


def random_ids(count: int) -> list[BlockId]:
    return [BlockId(os.urandom(16)) for _ in range(count)]


def tiers(ids: list[BlockId], tier: Tier = Tier.HBM) -> dict[BlockId, int]:
    return as_kept(dict.fromkeys(ids, int(tier)))


async def test_changes_arrive_and_a_late_router_reads_the_same(mesh: Mesh, client: RedisClient) -> None:
    mesh.follow()
    announcer = mesh.announcer()
    ids = random_ids(3000)
    announcer.add(ids, Tier.HBM)
    await eventually(lambda: mesh.held() == tiers(ids))
    announcer.add(ids[:10], Tier.SSD)
    announcer.remove(ids[2900:][::-1])
    wanted = tiers(ids[:2900]) | tiers(ids[:10], Tier.SSD)
    await eventually(lambda: mesh.held() == wanted)
    late = Mesh(client)
    late.follow()
    await asyncio.wait_for(late.follower.synced.wait(), 30)
    assert late.held() == wanted
    announcer.clear()
    await eventually(lambda: mesh.held() == late.held() == {})
    await late.end()


async def test_redis_coming_back_empty_loses_nothing(valkey: Valkey, mesh: Mesh) -> None:
    mesh.follow()
    announcer = mesh.announcer()
    ids = random_ids(1000)
    announcer.add(ids, Tier.HBM)
    await eventually(lambda: mesh.held() == tiers(ids))
    valkey.kill()
    more = random_ids(20)
    announcer.add(more, Tier.HBM)
    announcer.remove(ids[-5:])
    wanted = tiers(ids[:-5]) | tiers(more)
    valkey.start()
    while mesh.held() != wanted:
        assert len(mesh.held() or {}) >= 995
        await asyncio.sleep(0.005)
    await announcer.flushed(60)
    assert await mesh.client.hlen(announcer._keys.blocks("worker/w1")) == len(wanted)


async def test_a_flushed_redis_is_noticed_by_both_sides(mesh: Mesh) -> None:
    mesh.follow()
    announcer = mesh.announcer()
    ids = random_ids(100)
    announcer.add(ids, Tier.SSD)
    await eventually(lambda: mesh.held() == tiers(ids, Tier.SSD))
    await mesh.client.flushall()
    more = random_ids(5)
    announcer.add(more, Tier.HBM)
    await eventually(lambda: mesh.held() == tiers(ids, Tier.SSD) | tiers(more))


async def test_a_redis_that_hangs_is_caught_up_with(valkey: Valkey, mesh: Mesh) -> None:
    mesh.follow()
    announcer = mesh.announcer()
    ids = random_ids(100)
    announcer.add(ids[:50], Tier.HBM)
    await eventually(lambda: mesh.held() == tiers(ids[:50]))
    valkey.pause()
    try:
        announcer.add(ids[50:], Tier.HBM)
        await eventually(lambda: not announcer._health.connected)
    finally:
        valkey.resume()
    await eventually(lambda: mesh.held() == tiers(ids))
    await announcer.flushed(60)
    # What was sent and not answered has been applied once.
    assert await mesh.client.xlen(announcer._keys.changes) == announcer._seq


async def test_a_stream_trimmed_under_the_reader_is_read_anew(mesh: Mesh) -> None:
    mesh.follow()
    announcer = mesh.announcer()
    ids = random_ids(60)
    announcer.add(ids[:10], Tier.HBM)
    await eventually(lambda: mesh.held() == tiers(ids[:10]))
    await mesh.end(last=2)
    mesh.tasks.append(asyncio.create_task(announcer.run()))
    for at in range(10, 60, 10):
        announcer.add(ids[at : at + 10], Tier.HBM)
        await announcer.flushed(60)
    await mesh.client.xtrim(announcer._keys.changes, maxlen=0, approximate=False)
    mesh.follow()
    await eventually(lambda: mesh.held() == tiers(ids))


async def test_a_divergence_is_found_and_repaired(mesh: Mesh) -> None:
    mesh.follow()
    announcer = mesh.announcer()
    ids = random_ids(10)
    announcer.add(ids, Tier.HBM)
    await eventually(lambda: mesh.held() == tiers(ids))
    mesh.replica.blocks.remove(mesh.replica.locations["worker/w1"].held, ids[3:4])
    await eventually(lambda: mesh.held() == tiers(ids))


async def test_a_new_epoch_replaces_the_old_one_which_is_then_rejected(mesh: Mesh) -> None:
    mesh.follow()
    old = mesh.announcer(epoch=1)
    ids = random_ids(20)
    old.add(ids[:10], Tier.HBM)
    await eventually(lambda: mesh.held() == tiers(ids[:10]))
    new = mesh.announcer(epoch=2)
    new.add(ids[10:], Tier.HBM)
    await eventually(lambda: mesh.held() == tiers(ids[10:]))
    old.add(ids[:1], Tier.HBM)
    old.remove(ids[:1])
    await eventually(lambda: old._superseded)
    await old.close()
    new.add(ids[:1], Tier.HBM)
    await eventually(lambda: mesh.held() == tiers(ids[10:] + ids[:1]))


async def test_a_lost_lease_and_a_clean_stop_remove_a_location(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh.follow()
    ids = random_ids(5)
    monkeypatch.setattr(announcer_module, "LEASE_S", 600.0)
    stopping = mesh.announcer("stopping")
    stopping.add(ids, Tier.HBM)
    await eventually(lambda: mesh.held("stopping") == tiers(ids))
    await mesh.end(last=1)
    await stopping.close()
    await eventually(lambda: mesh.held("stopping") is None)
    monkeypatch.setattr(announcer_module, "LEASE_S", 0.5)
    mesh.announcer("dying").add(ids, Tier.HBM)
    await eventually(lambda: mesh.held("dying") == tiers(ids))
    await mesh.end(last=1)
    await eventually(lambda: mesh.held("dying") is None)
    await eventually(lambda: not len(mesh.replica.blocks))


async def test_a_holder_that_was_stopped_for_longer_than_its_lease_announces_again(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcer_module, "LEASE_S", 0.4)
    mesh.follow()
    announcer = mesh.announcer()
    ids = random_ids(5)
    announcer.add(ids, Tier.HBM)
    await eventually(lambda: mesh.held() == tiers(ids))
    await mesh.end(last=1)
    await eventually(lambda: mesh.held() is None)
    mesh.tasks.append(asyncio.create_task(announcer.run()))
    await eventually(lambda: mesh.held() == tiers(ids))


async def test_cancelling_ends_a_follower_at_any_moment(client: RedisClient) -> None:
    """Python 3.11's `wait_for` loses cancellations; the client must not wait with it."""
    for number in range(40):
        running = asyncio.create_task(IndexFollower(client, Replica()).run())
        await asyncio.sleep(0.002 * number)
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=30.0)
        assert done
