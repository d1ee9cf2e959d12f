"""Leases of batches in a real Valkey: one holder at a time, and none that outlives its life."""

from __future__ import annotations

from services.common.keys import KeySpace
from services.common.redis_client import connect_redis
from services.gateway.batches.lease import LEASE_S, BatchLease
from tests.support.valkey import Valkey
from tests.support.waiting import eventually_async

BATCH = "batch_0"


async def held(lease: BatchLease) -> bool:
    """Its answer, once Redis gives one: a busy machine may take longer than a call waits."""
    answer: bool | None = None

    async def is_answered() -> bool:
        nonlocal answer
        answer = await lease.hold(BATCH)
        return answer is not None

    await eventually_async(is_answered)
    return answer is True


async def test_one_has_it_until_it_gives_it_back_or_it_lapses(valkey: Valkey) -> None:
    client, key = connect_redis(valkey.url), KeySpace().batch(BATCH)
    try:
        first, second = BatchLease(client, "a"), BatchLease(client, "b")
        assert await held(first)
        assert await client.pttl(key) <= LEASE_S * 1000
        # However slow the machine is, it does not lapse meanwhile.
        await client.set(key, "a")
        assert not await held(second)
        await second.give_back(BATCH)
        assert await client.get(key) == b"a"
        await client.delete(key)
        assert await held(second)
        await client.set(key, "b")
        assert not await held(first)
        # As if its holder had said nothing for so long.
        await client.pexpire(key, 1)
        await eventually_async(lambda: held(first))
        valkey.kill()
        assert await first.hold(BATCH) is None
        valkey.start()
        # Restarted empty it knows of nobody.
        assert await held(second)
    finally:
        await client.aclose()
