"""What an announcer keeps and sends, without a router."""

from __future__ import annotations

import asyncio
import os

from hypothesis import given, settings
from hypothesis import strategies as st
from redis.exceptions import RedisError

from services.common.announced_set import BATCH_IDS, AnnouncedSet
from services.common.announcements import Kind, pack_adds, unpack_adds
from services.common.announcer import Announcer, Tier
from services.common.blocks import BlockId, split_ids
from services.common.redis_client import RedisClient
from tests.support.valkey import Valkey
from tests.support.waiting import eventually_async

IDS = [BlockId(bytes([number]) * 16) for number in range(20)]


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "remove", "clear", "all", "send"]),
            st.lists(st.sampled_from(IDS), max_size=6, unique=True),
            st.integers(0, 2),
        ),
        max_size=50,
    )
)
def test_what_is_sent_adds_up_to_what_is_held(steps: list[tuple[str, list[BlockId], int]]) -> None:
    announced, held, index = AnnouncedSet(), dict[BlockId, int](), dict[BlockId, int]()
    staged: dict[BlockId, int] = {}

    def send(most: int) -> None:
        nonlocal index, staged
        while most and (batch := announced.next_batch()) is not None:
            most -= 1
            if batch.kind & Kind.BEGIN:
                staged = {}
            target = staged if batch.kind & Kind.STAGED else index
            target.update(unpack_adds(batch.adds))
            for id_ in split_ids(batch.removes):
                del target[id_]
            if batch.kind & Kind.COMMIT:
                index = staged
            if not batch.kind & Kind.STAGED or batch.kind & Kind.COMMIT:
                assert batch.count == len(index)

    for action, ids, tier in steps:
        if action == "add":
            announced.add(ids, tier)
            held.update(dict.fromkeys(ids, tier))
        elif action == "remove":
            announced.remove(ids)
            for id_ in ids:
                held.pop(id_, None)
        elif action == "clear":
            announced.clear()
            held.clear()
        elif action == "all":
            announced.announce_all()
        else:
            send(1)
        assert len(announced) == len(held)
        assert len(announced._entries) <= len(held.keys() | index.keys() | staged.keys())
        assert announced._dirty.keys() <= announced._entries.keys()
    send(100)
    assert index == held
    assert not announced.pending
    assert len(announced._entries) == len(held)


def test_batches_are_bounded() -> None:
    announced = AnnouncedSet()
    announced.add([BlockId(number.to_bytes(16, "big")) for number in range(1000)], 0)
    sizes = []
    while (batch := announced.next_batch()) is not None:
        sizes.append(len(batch.adds) // 17)
    assert sizes == [BATCH_IDS] * 3 + [1000 - 3 * BATCH_IDS]


def test_entries_pack() -> None:
    entries = [(id_, number % 3) for number, id_ in enumerate(IDS)]
    assert unpack_adds(pack_adds(entries)) == entries


async def test_it_keeps_nothing_back_and_leaves_nothing_behind(client: RedisClient) -> None:
    announcer = Announcer(client, kind="kvstore", location_id="k", epoch=1)
    running = asyncio.create_task(announcer.run())
    ids = [BlockId(os.urandom(16)) for _ in range(700)]
    announcer.add(ids, Tier.RAM)
    announcer.add(ids[:3], Tier.SSD)
    await announcer.flushed(60)
    blocks = announcer._keys.blocks("kvstore/k")
    stored = await client.hgetall(blocks)
    assert stored == dict.fromkeys(ids, b"\x01") | dict.fromkeys(ids[:3], b"\x02")
    assert 0 < await client.pttl(blocks) <= 10_000
    assert announcer.digest[0] == len(announcer) == 700
    running.cancel()
    await announcer.close()
    assert not [key for key in await client.keys("*") if b"blocks" in key or b"meta" in key]


async def test_a_server_that_forgets_the_script_gets_it_again(client: RedisClient) -> None:
    announcer = Announcer(client, kind="worker", location_id="w", epoch=1)
    running = asyncio.create_task(announcer.run())
    announcer.add(IDS[:1], Tier.HBM)
    await announcer.flushed(60)
    await client.script_flush()
    announcer.add(IDS[1:2], Tier.HBM)
    await announcer.flushed(60)
    assert await client.hlen(announcer._keys.blocks("worker/w")) == 2
    running.cancel()


async def test_while_redis_is_away_memory_is_bounded_by_what_is_held(valkey: Valkey, client: RedisClient) -> None:
    announcer = Announcer(client, kind="worker", location_id="w", epoch=1)
    running = asyncio.create_task(announcer.run())
    announcer.add(IDS, Tier.HBM)
    await announcer.flushed(60)
    valkey.kill()
    for number in range(1, 5001):
        id_ = BlockId(number.to_bytes(16, "big"))
        announcer.add([id_], Tier.HBM)
        announcer.remove([id_])
    assert len(announcer._set._entries) == len(IDS)
    valkey.start()

    async def announced_again() -> bool:
        try:
            return await client.hlen(announcer._keys.blocks("worker/w")) == len(IDS)
        except RedisError:
            return False

    await eventually_async(announced_again)
    running.cancel()
