"""Quotas in a real Valkey: agreed by gateways, settled, leased, and kept by shares while it does not answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.common.redis_client import connect_redis
from services.common.token_bucket import TokenBucket
from services.gateway.errors import TenantLimitExceeded
from services.gateway.quota_share import QuotaLeft, QuotaShare, UsedUp
from services.gateway.quotas import Charge, Quotas
from services.gateway.tenants import TenantPolicy
from tests.support.valkey import Valkey
from tests.support.waiting import eventually_async

KEY = b"k" * 16


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    valkey = Valkey(Path(tmp_path_factory.mktemp("valkey")))
    valkey.start()
    yield valkey
    valkey.stop()


@contextlib.asynccontextmanager
async def gateway(valkey: Valkey, name: str) -> AsyncIterator[Quotas]:
    client = connect_redis(valkey.url)
    quotas = Quotas(client, name, KEY)
    task = asyncio.create_task(quotas.run())
    try:
        yield quotas
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.aclose()


@pytest.fixture
async def pair(server: Valkey) -> AsyncIterator[tuple[Quotas, Quotas]]:
    """Two gateways on an empty Valkey."""
    async with gateway(server, "g1") as one, gateway(server, "g2") as two:
        await one._client.flushall()
        yield one, two


async def charged(quotas: Quotas, policy: TenantPolicy, tokens: float = 10.0, tenant: str = "t") -> Charge:
    charge = await quotas.charge(tenant, policy, tokens)
    assert charge is not None
    return charge


async def refusal(quotas: Quotas, policy: TenantPolicy, tokens: float = 10.0) -> TenantLimitExceeded:
    with pytest.raises(TenantLimitExceeded) as caught:
        await quotas.charge("t", policy, tokens)
    return caught.value


async def admits(quotas: Quotas, policy: TenantPolicy, tokens: float = 10.0) -> bool:
    try:
        quotas.settle(await charged(quotas, policy, tokens), 0)
    except TenantLimitExceeded:
        return False
    return True


async def has_to_tell(quotas: Quotas, count: int) -> bool:
    """Whether Redis has yet to hear of so many requests that have ended."""
    return len(quotas._usages["t"].ended) == count


async def test_who_has_no_quota_is_not_counted(pair: tuple[Quotas, Quotas]) -> None:
    assert await pair[0].charge("t", TenantPolicy(context_tokens=5), 1e9) is None
    assert await pair[0]._client.dbsize() == 0


async def test_requests_per_minute_are_agreed_by_gateways(pair: tuple[Quotas, Quotas]) -> None:
    policy = TenantPolicy(requests_per_minute=4)
    for at in range(4):
        pair[at % 2].settle(await charged(pair[at % 2], policy), 10)
    for quotas in pair:
        error = await refusal(quotas, policy)
        assert "4 requests per minute" in error.message
        assert error.retry_after_s is not None
        assert 10 < error.retry_after_s <= 15
    await charged(pair[0], policy, tenant="other")
    assert not any(name in key for key in await pair[0]._client.keys() for name in (b"other",))


async def test_tokens_are_charged_by_estimate_and_settled(pair: tuple[Quotas, Quotas]) -> None:
    policy = TenantPolicy(tokens_per_minute=1000)
    first = await charged(pair[0], policy, 900)
    assert "1000 tokens per minute" in (await refusal(pair[1], policy, 200)).message
    pair[0].settle(first, 100)
    await eventually_async(lambda: admits(pair[1], policy, 800))
    pair[1].settle(await charged(pair[1], policy, 5), 4000)
    error = await refusal(pair[1], policy, 1)
    assert error.retry_after_s is not None
    assert error.retry_after_s > 120, "what was used beyond a minute's is owed"


async def test_a_quota_given_later_begins_full(pair: tuple[Quotas, Quotas]) -> None:
    pair[0].settle(await charged(pair[0], TenantPolicy(requests_per_minute=4), 5000), 5000)
    await eventually_async(lambda: has_to_tell(pair[0], 0))
    assert await admits(pair[0], TenantPolicy(requests_per_minute=4, tokens_per_minute=1000), 900)


async def test_places_in_flight_are_leases(pair: tuple[Quotas, Quotas]) -> None:
    policy = TenantPolicy(concurrent_requests=2)
    held = [await charged(quotas, policy) for quotas in pair]
    assert "2 requests at a time" in (await refusal(pair[0], policy)).message
    pair[0].settle(held[0], 10)
    again = await charged(pair[0], policy)
    assert [quotas.num_open for quotas in pair] == [1, 1]
    pair[0].settle(again, 10)
    pair[1].settle(held[1], 10)
    await eventually_async(lambda: admits(pair[1], policy))
    assert [quotas.num_open for quotas in pair] == [0, 0]


async def test_the_places_of_a_dead_gateway_come_back(server: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.quotas.LEASE_S", 2.5)
    policy = TenantPolicy(concurrent_requests=2)
    async with gateway(server, "living") as living:
        await living._client.flushall()
        mine = await charged(living, policy)
        async with gateway(server, "dying") as dying:
            await charged(dying, policy)
        assert not await admits(living, policy)
        await eventually_async(lambda: admits(living, policy))
        held = await charged(living, policy)
        await asyncio.sleep(3.5)  # longer than a lease: these two are renewed
        assert not await admits(living, policy)
        for charge in (mine, held):
            living.settle(charge, 1)


async def test_without_redis_each_gateway_enforces_its_share(pair: tuple[Quotas, Quotas], server: Valkey) -> None:
    policy = TenantPolicy(requests_per_minute=20, concurrent_requests=8)
    for quotas in (*pair, *pair):
        quotas.settle(await charged(quotas, policy), 10)
    server.pause()
    try:
        alone = [await charged(pair[0], policy) for _ in range(4)]
        assert all(charge.is_local for charge in alone)
        assert "at a time" in (await refusal(pair[0], policy)).message
        for charge in alone:
            pair[0].settle(charge, 10)
        assert [await admits(pair[0], policy) for _ in range(6)] == [True] * 4 + [False] * 2
    finally:
        server.resume()

    async def is_shared() -> bool:
        charge = await pair[0].charge("u", policy, 10.0)
        assert charge is not None
        pair[0].settle(charge, 0)
        return not charge.is_local

    await eventually_async(is_shared, every_s=0.2)


async def test_redis_that_comes_back_empty_fails_no_request(pair: tuple[Quotas, Quotas], server: Valkey) -> None:
    policy = TenantPolicy(concurrent_requests=3, tokens_per_minute=10_000)
    before = await charged(pair[0], policy)
    server.restart()
    for quotas in pair:
        quotas.settle(await charged(quotas, policy), 10)
    pair[0].settle(before, 10)
    await eventually_async(lambda: admits(pair[1], policy))


async def test_what_ends_while_redis_is_away_is_kept_in_bounds(server: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.quotas._MAX_ENDED", 8)
    policy = TenantPolicy(concurrent_requests=2)
    async with gateway(server, "g1") as quotas:
        await quotas._client.flushall()
        server.pause()
        try:
            for _ in range(20):
                quotas.settle(await charged(quotas, policy), 10)
            await eventually_async(lambda: has_to_tell(quotas, 8))
        finally:
            server.resume()
        await eventually_async(lambda: has_to_tell(quotas, 0))
        quotas.settle(await charged(quotas, policy), 10)


def test_a_share_is_what_was_left_divided_by_the_gateways() -> None:
    policy = TenantPolicy(requests_per_minute=60, tokens_per_minute=6000, concurrent_requests=4)
    share = QuotaShare(policy, QuotaLeft(requests=6, tokens=200, gateways=2))
    assert [share.take(10, 0, 0.0) for _ in range(3)] == [None] * 3
    used_up = share.take(10, 0, 0.0)
    assert used_up == UsedUp("requests", 2.0)
    assert share.take(10, 2, 2.1) == UsedUp("concurrent", 1.0)
    assert share.take(500, 0, 2.1) == UsedUp("tokens", pytest.approx((500 - 70 - 105) / 50))
    share.give_back(400, 2.1)
    assert share.take(300, 0, 2.1) is None
    fresh = QuotaShare(TenantPolicy(requests_per_minute=2), None)
    assert [fresh.take(1, 0, 0.0) is None for _ in range(3)] == [True, True, False]


def test_a_bucket_refills_and_never_locks_out_what_exceeds_it() -> None:
    bucket = TokenBucket(10, per_s=2)
    assert bucket.wait_s(100, 0) == 0
    bucket.take(100, 0)
    assert bucket.wait_s(1, 0) == pytest.approx(45.5)
    assert bucket.wait_s(100, 50) == 0
    assert bucket.is_full(50)
