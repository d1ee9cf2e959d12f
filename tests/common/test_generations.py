"""Generations of cleared tenants: joined in any order, carried through a real Valkey, kept over its loss."""

from __future__ import annotations

import asyncio
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common import generation_table
from services.common.blocks import owner_digest, split_owner, tenant_tag
from services.common.generation_file import load_generations, save_generations
from services.common.generation_follower import GenerationFollower
from services.common.generation_table import GenerationTable, TableFull
from services.common.generations import Generations
from services.common.keys import KeySpace
from services.common.redis_client import RedisClient, connect_redis
from services.common.registry import new_epoch
from tests.support.valkey import Valkey
from tests.support.waiting import SOON_S, eventually, eventually_async

KEY = bytes(range(32))
ONE, TWO = tenant_tag(KEY, "one"), tenant_tag(KEY, "two")
KEYS = KeySpace().generations()
tables = st.dictionaries(st.sampled_from([ONE, TWO, b"x" * 8]), st.integers(1, 2**53))


@pytest.fixture(autouse=True)
def settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests do not wait for followers that a fresh Redis has not heard of."""
    monkeypatch.setattr(generation_table, "SETTLE_S", 0.0)


async def following(
    client: RedisClient, tasks: asyncio.TaskGroup, name: str = "gateway/g1", **options: object
) -> GenerationFollower:
    """A follower that runs and knows what Redis knows."""
    follower = GenerationFollower(client, name, epoch=new_epoch(), **options)  # type: ignore[arg-type]
    tasks.create_task(follower.run())
    await asyncio.wait_for(follower.synced.wait(), 30)
    return follower


@given(st.lists(tables, max_size=6), st.randoms())
def test_what_is_known_does_not_depend_on_the_order(parts: list[dict[bytes, int]], random: Random) -> None:
    first, second = Generations(), Generations()
    for part in parts:
        first.merge(part)
    for part in sorted(parts * 2, key=lambda _: random.random()):
        second.merge(part)
    assert first.beyond({}) == second.beyond({})
    assert first.beyond(second.beyond({})) == {}


def test_an_owner_is_dead_once_its_tenant_was_cleared() -> None:
    generations = Generations()
    owner = owner_digest(KEY, tenant="one")
    assert split_owner(owner) == (ONE, 0)
    assert not generations.is_dead(owner)
    assert generations.merge({ONE: 7}) == {ONE: 7}
    assert generations.merge({ONE: 6}) == {}
    assert generations.is_dead(owner)
    assert generations.is_dead(owner_digest(KEY, tenant="one", cleared=6))
    assert not generations.is_dead(owner_digest(KEY, tenant="one", cleared=7))
    assert not generations.is_dead(owner_digest(KEY, tenant="two"))


async def test_a_clearing_reaches_every_follower(client: RedisClient, tasks: asyncio.TaskGroup) -> None:
    followers = [await following(client, tasks, f"gateway/g{number}") for number in range(3)]
    before = new_epoch()
    began_s = time.monotonic()
    outcome = await GenerationTable(client).clear(ONE, timeout_s=30)
    assert time.monotonic() - began_s < SOON_S
    assert outcome.generation >= before - 1_000_000
    assert outcome.done == ("gateway/g0", "gateway/g1", "gateway/g2")
    assert outcome.missing == {}
    assert all(follower.generations.of(ONE) == outcome.generation for follower in followers)
    assert all(follower.generations.of(TWO) == 0 for follower in followers)
    again = await GenerationTable(client).clear(ONE, timeout_s=30)
    assert again.generation > outcome.generation
    late = await following(client, tasks, "gateway/late")
    assert late.generations.of(ONE) == again.generation


async def test_who_has_not_carried_it_out_is_named(client: RedisClient, tasks: asyncio.TaskGroup) -> None:
    refusals = 0
    broken = True

    async def carry_out(table: Mapping[bytes, int]) -> None:
        nonlocal refusals
        if broken:
            refusals += 1
            raise OSError("the disk refuses")

    node = await following(client, tasks, "kvstore/kv-1", carry_out=carry_out)
    await following(client, tasks)
    outcome = await GenerationTable(client).clear(ONE, timeout_s=3)
    assert (outcome.done, list(outcome.missing)) == (("gateway/g1",), ["kvstore/kv-1"])
    assert refusals > 0
    assert node.generations.of(ONE) == 0
    broken = False
    await eventually(lambda: node.generations.of(ONE) == outcome.generation)
    assert (await GenerationTable(client).clear(ONE, timeout_s=30)).missing == {}


async def test_a_silent_follower_is_reported_until_it_leaves(client: RedisClient, tasks: asyncio.TaskGroup) -> None:
    follower = GenerationFollower(client, "gateway/g1", epoch=new_epoch())
    running = tasks.create_task(follower.run())
    await asyncio.wait_for(follower.synced.wait(), 30)
    running.cancel()
    assert list((await GenerationTable(client).clear(ONE, timeout_s=0.3)).missing) == ["gateway/g1"]
    epoch, known, _ = (await client.hget(KEYS.followers, "gateway/g1")).split()
    await client.hset(KEYS.followers, "gateway/g1", b"%s %s %d" % (epoch, known, time.time() - 60))
    began_s = time.monotonic()
    outcome = await GenerationTable(client).clear(ONE, timeout_s=60)
    assert time.monotonic() - began_s < SOON_S, "who has been silent for a minute is not waited for"
    assert outcome.missing["gateway/g1"].silent_s >= 59
    await follower.close()
    assert (await GenerationTable(client).clear(ONE, timeout_s=30)).missing == {}
    await client.hset(KEYS.followers, "gateway/gone", b"1 0 1")
    assert (await GenerationTable(client).clear(ONE, timeout_s=30)).missing == {}
    assert await client.hgetall(KEYS.followers) == {}


@pytest.mark.parametrize("how", ["restart", "flushall"])
async def test_a_redis_that_comes_back_empty_is_told(
    valkey: Valkey, client: RedisClient, tasks: asyncio.TaskGroup, how: str
) -> None:
    follower = await following(client, tasks)
    first = (await GenerationTable(client).clear(ONE, timeout_s=30)).generation
    if how == "flushall":
        await client.flushall()
    else:
        valkey.restart(empty=True)
    probe = connect_redis(valkey.url)

    async def is_back() -> bool:
        return bool(await probe.hget(KEYS.table, ONE) == str(first).encode())

    await eventually_async(is_back)
    late = await following(probe, tasks, "gateway/late")
    assert late.generations.of(ONE) == first
    second = await GenerationTable(probe).clear(ONE, timeout_s=30)
    assert second.generation > first
    assert second.missing == {}
    assert follower.generations.of(ONE) == late.generations.of(ONE) == second.generation
    await probe.aclose()


async def test_a_generation_that_is_put_back_does_not_undo_a_clearing(
    client: RedisClient, tasks: asyncio.TaskGroup
) -> None:
    """Redis is empty and its clock is behind the one that made an earlier generation."""
    known = Generations()
    known.merge({ONE: new_epoch() + 3_600_000_000})
    table = GenerationTable(client)
    raised = await table._raise(ONE)
    follower = await following(client, tasks, generations=known)
    await eventually(lambda: follower._revision > raised.revision)
    state = await table._state(ONE)
    assert table._must_raise_again(raised, state)
    outcome = await table.clear(ONE, timeout_s=30)
    assert outcome.generation > state.generation
    assert follower.generations.of(ONE) == outcome.generation


async def test_redis_lost_in_the_middle_of_a_clearing(
    client: RedisClient, tasks: asyncio.TaskGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = await following(client, tasks)
    table = GenerationTable(client)
    raise_, calls = table._raise, 0

    async def raise_and_lose(tag: bytes) -> generation_table.Raised:
        nonlocal calls
        calls += 1
        raised = await raise_(tag)
        if calls == 1:
            await client.flushall()
        return raised

    monkeypatch.setattr(table, "_raise", raise_and_lose)
    outcome = await table.clear(ONE, timeout_s=30)
    assert follower.generations.of(ONE) == outcome.generation


async def test_of_two_with_one_name_the_later_counts(client: RedisClient, tasks: asyncio.TaskGroup) -> None:
    old = await following(client, tasks)
    new = await following(client, tasks)
    await eventually(lambda: old._superseded)
    heard_s = old.current_at_s
    outcome = await GenerationTable(client).clear(ONE, timeout_s=30)
    assert new.generations.of(ONE) == outcome.generation
    assert old.current_at_s == heard_s, "it must not believe itself current"
    await old.close()
    assert await client.hexists(KEYS.followers, "gateway/g1")


async def test_the_table_is_bounded(client: RedisClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_table, "MAX_TENANTS", 1)
    table = GenerationTable(client)
    await table.clear(ONE, timeout_s=30)
    await table.clear(ONE, timeout_s=30)
    with pytest.raises(TableFull):
        await table.clear(TWO, timeout_s=30)


def test_generations_outlive_a_process_in_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "generations"
    assert len(load_generations(path)) == 0
    known = Generations()
    known.merge({ONE: 5, TWO: 2**52})
    save_generations(path, known)
    assert load_generations(path).beyond({}) == {ONE: 5, TWO: 2**52}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
    for text in (
        "[1]",
        f'{{"{ONE.hex()}": {2**64}}}',
        f'{{"{ONE.hex()}": -1}}',
        '{"00": 5}',
        f'{{"{ONE.hex()}": null}}',
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match="not a table"):
            load_generations(path)
