"""Several routers over one real Valkey: whatever happens, all know in the end exactly what the holders hold."""

from __future__ import annotations

import asyncio
import random
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

CHAIN_BLOCKS = 60


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "OVERVIEW_EVERY_S", 0.2)
    monkeypatch.setattr(follower_module, "EMPTY_OVERVIEW_EVERY_S", 1.0)
    monkeypatch.setattr(announcer_module, "RENEW_S", 0.3)
    monkeypatch.setattr(announcer_module, "REJOIN_JITTER_S", 0.2)


@pytest.fixture
async def client(valkey: Valkey) -> AsyncIterator[RedisClient]:
    client = connect_redis(valkey.url)
    yield client
    await client.aclose()


class Holder:
    """A location whose chains grow and shrink from their ends, over its lives."""

    def __init__(self, client: RedisClient, name: str, chains: list[list[BlockId]]) -> None:
        self._client, self._name, self._chains = client, name, chains
        self._epoch = 0
        self.start()

    @property
    def held(self) -> dict[BlockId, int]:
        return {
            id_: self._tier[id_]
            for chain, depth in zip(self._chains, self._depths, strict=True)
            for id_ in chain[:depth]
        }

    def start(self) -> None:
        self._epoch += 1
        self._depths = [0] * len(self._chains)
        self._tier: dict[BlockId, int] = {}
        self.announcer = Announcer(self._client, kind="kvstore", location_id=self._name, epoch=self._epoch)
        self._task = asyncio.create_task(self.announcer.run())

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def change(self, draw: random.Random) -> None:
        number, depth = draw.randrange(len(self._chains)), draw.randint(0, CHAIN_BLOCKS)
        chain, before = self._chains[number], self._depths[number]
        self._depths[number] = depth
        if depth < before:
            self.announcer.remove(chain[depth:before][::-1])
        else:
            tier = draw.choice([Tier.RAM, Tier.SSD])
            self._tier.update(dict.fromkeys(chain[before:depth], int(tier)))
            self.announcer.add(chain[before:depth], tier)

    def clear(self) -> None:
        self._depths = [0] * len(self._chains)
        self.announcer.clear()


class Router:
    """A follower and its replica."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self.replica = Replica()
        self.follow()

    def follow(self) -> None:
        self._task = asyncio.create_task(IndexFollower(self._client, self.replica).run())

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def test_routers_agree_with_the_holders_after_any_of_it(valkey: Valkey, client: RedisClient) -> None:
    draw = random.Random(5)
    chains = [[BlockId(draw.randbytes(16)) for _ in range(CHAIN_BLOCKS)] for _ in range(4)]
    holders = {f"k{number}": Holder(client, f"k{number}", chains) for number in range(5)}
    routers = [Router(client) for _ in range(3)]

    async def churn(rounds: int) -> None:
        for _ in range(rounds):
            holder = draw.choice(list(holders.values()))
            holder.change(draw)
            await asyncio.sleep(0.002)

    def agrees(router: Router) -> bool:
        replica = router.replica
        return all(held_by(replica, f"kvstore/{name}") == as_kept(one.held) for name, one in holders.items())

    try:
        await churn(100)
        # One is away while a location starts anew, another clears and the streams lose their beginnings.
        await routers[0].stop()
        await holders["k1"].stop()
        holders["k1"].start()
        holders["k2"].clear()
        await churn(100)
        for holder in holders.values():
            await holder.announcer.flushed(60)
            await client.xtrim(holder.announcer._keys.changes, maxlen=2, approximate=False)
        routers[0].follow()
        await churn(30)
        valkey.kill()
        await churn(30)
        valkey.start()
        await churn(30)
        await eventually(lambda: all(map(agrees, routers)))
        for router in routers:
            for chain in chains:
                lengths = router.replica.find(chain).lengths(router.replica.blocks.num_slots)
                for name, one in holders.items():
                    location = router.replica.locations[f"kvstore/{name}"]
                    assert lengths[location.slot] == sum(id_ in one.held for id_ in chain)
    finally:
        for router in routers:
            await router.stop()
        for holder in holders.values():
            await holder.stop()
