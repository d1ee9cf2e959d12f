"""Keys and what follows from them, and the records in Redis that gateways agree by."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvmesh.v1.router_pb2 import Grant

from services.common.redis_client import RedisClient, connect_redis
from services.gateway import idempotency_records
from services.gateway.errors import InvalidRequest
from services.gateway.idempotency import body_digest, check_key, names_of
from services.gateway.idempotency_records import (
    Claim,
    IdempotencyRecords,
    OtherBody,
    Place,
    RecordsLost,
    begun_fields,
    place_fields,
)
from services.gateway.keyed_run import KeyedRun
from tests.support.valkey import Valkey
from tests.support.waiting import eventually

SECRET = bytes(range(32))
WINDOW_S = 0.4
PLACES = {0: Place("127.0.0.1:7000", "a worker", 2, is_resumed=True), 1: Place("h:1", "w", 1, is_resumed=False)}


@pytest.fixture
async def client(valkey: Valkey) -> AsyncIterator[RedisClient]:
    made = connect_redis(valkey.url)
    yield made
    await made.aclose()


@pytest.fixture
def records(client: RedisClient) -> IdempotencyRecords:
    return IdempotencyRecords(client, WINDOW_S)


@pytest.mark.parametrize("key", ["", "k" * 256, "ü", "a\nb"])
def test_keys_that_are_none(key: str) -> None:
    with pytest.raises(InvalidRequest):
        check_key(key)


@given(st.text(max_size=8), st.text(max_size=8), st.text(max_size=8), st.text(max_size=8))
def test_names_tell_tenants_and_keys_apart(tenant: str, key: str, other_tenant: str, other_key: str) -> None:
    same = (tenant, key) == (other_tenant, other_key)
    one, other = names_of(SECRET, tenant, key), names_of(SECRET, other_tenant, other_key)
    assert (one == other) is same
    assert (body_digest(SECRET, tenant, key.encode()) == body_digest(SECRET, other_tenant, other_key.encode())) is same
    assert names_of(bytes(32), tenant, key) != one
    assert 0 <= one.seed < 2**64


async def test_a_request_is_claimed_once(records: IdempotencyRecords) -> None:
    first = await records.claim("t", "body", life_s=60)
    second = await records.claim("t", "body", life_s=60)
    assert first.is_ours
    assert (second.is_ours, second.run, second.at_s, second.places) == (False, first.run, first.at_s, ())
    assert (await records.claim("u", "body", life_s=60)).is_ours
    with pytest.raises(OtherBody):
        await records.claim("t", "another", life_s=60)


async def test_a_repeat_learns_where_the_request_runs(records: IdempotencyRecords) -> None:
    first = await records.claim("t", "body", life_s=60)
    begun = begun_fields("m", b"digest", 2)
    assert await records.note("t", first.run, begun | place_fields({0: PLACES[0]}, 2, 1), life_s=60)
    assert (await records.claim("t", "body", life_s=60)).places == ()
    assert await records.note("t", first.run, begun | place_fields(PLACES, 2, 2), life_s=60)
    found = await records.claim("t", "body", life_s=60)
    assert found == Claim(first.run, first.at_s, False, "m", b"digest", (PLACES[0], PLACES[1]), "2")


async def test_a_run_that_cannot_be_read_is_superseded_once(records: IdempotencyRecords) -> None:
    first = await records.claim("t", "body", life_s=60)
    begun = begun_fields("m", b"digest", 1)
    await records.note("t", first.run, begun | place_fields({0: PLACES[0]}, 1, 1), life_s=60)
    failed = await records.claim("t", "body", life_s=60)
    await records.note("t", first.run, begun | place_fields({0: PLACES[1]}, 1, 2), life_s=60)
    moved = await records.claim("t", "body", life_s=60, failed=failed)
    assert moved.places == (PLACES[1],), "it has found another worker meanwhile"
    second = await records.claim("t", "body", life_s=60, failed=moved)
    third = await records.claim("t", "body", life_s=60, failed=moved)
    assert (second.is_ours, third.is_ours, third.run) == (True, False, second.run)
    assert (second.at_s, second.run > first.run) == (first.at_s, True)
    assert not await records.note("t", first.run, {}, life_s=60)
    await records.forget("t", first.run)
    assert not (await records.claim("t", "body", life_s=60)).is_ours
    await records.forget("t", second.run)
    assert (await records.claim("t", "another", life_s=60)).is_ours


async def test_a_run_whose_gateway_has_died_before_any_worker_had_it(
    records: IdempotencyRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency_records, "LEASE_S", 0.1)
    first = await records.claim("t", "body", life_s=60)
    await asyncio.sleep(0.15)
    monkeypatch.setattr(idempotency_records, "LEASE_S", 60.0)
    assert await records.note("t", first.run, {}, life_s=60), "a lease may lapse while nobody else wants the run"
    assert not (await records.claim("t", "body", life_s=60)).is_ours
    monkeypatch.setattr(idempotency_records, "LEASE_S", 0.1)
    assert await records.note("t", first.run, {}, life_s=60)
    await asyncio.sleep(0.15)
    assert (await records.claim("t", "body", life_s=60)).is_ours


async def test_the_window_ends(records: IdempotencyRecords) -> None:
    first = await records.claim("t", "body", life_s=60)
    await records.note("t", first.run, {}, life_s=0)
    with pytest.raises(OtherBody):
        await records.claim("t", "another", life_s=60)
    await asyncio.sleep(WINDOW_S + 0.05)
    assert (await records.claim("t", "another", life_s=60)).is_ours


async def test_nobody_waits_long_for_redis(records: IdempotencyRecords, valkey: Valkey) -> None:
    await records.claim("t", "body", life_s=60)
    valkey.pause()
    with pytest.raises(RecordsLost):
        await records.claim("t", "body", life_s=60)
    # For a while after a loss no call waits at all: it ends before anything is awaited.
    with pytest.raises(RecordsLost):
        records.claim("t", "body", life_s=60).send(None)
    valkey.resume()

    async def answers() -> bool:
        try:
            await records.claim("t", "body", life_s=60)
        except RecordsLost:
            return False
        return True

    async with asyncio.timeout(60):
        while not await answers():
            await asyncio.sleep(0.05)


async def test_what_a_run_tells(records: IdempotencyRecords, client: RedisClient) -> None:
    names = names_of(SECRET, "tenant", "a key")
    claim = await records.claim(names.tag, "body", life_s=60)
    run = KeyedRun(records, names, claim, keep_s=WINDOW_S, deadline_at_s=time.monotonic() + 60)
    task = asyncio.create_task(run.tell())
    run.begin("m", b"digest", 1)
    run.keeper(0).placed(Grant(worker_id="w", worker_address="h:1"), 1, is_resumed=False)
    found = [claim]

    async def is_told() -> bool:
        found[0] = await records.claim(names.tag, "body", life_s=60)
        return bool(found[0].places)

    async with asyncio.timeout(60):
        while not await is_told():
            await asyncio.sleep(0.01)
    assert found[0].places == (Place("h:1", "w", 1, is_resumed=False),)
    keys = [key.decode() async for key in client.scan_iter()]
    assert not any("tenant" in key or "a key" in key for key in keys)
    run.end(is_complete=False, is_failed=True)
    await asyncio.wait_for(task, 30)
    assert (await records.claim(names.tag, "another", life_s=60)).is_ours, "a failure is not repeated"


async def test_a_superseded_run_goes_on_untold(records: IdempotencyRecords) -> None:
    names = names_of(SECRET, "tenant", "a key")
    claim = await records.claim(names.tag, "body", life_s=60)
    await records.claim(names.tag, "body", life_s=60, failed=claim)
    run = KeyedRun(records, names, claim, keep_s=WINDOW_S, deadline_at_s=time.monotonic() + 60)
    task = asyncio.create_task(run.tell())
    run.begin("m", b"digest", 1)
    await eventually(task.done)
    run.end(is_complete=True, is_failed=False)
