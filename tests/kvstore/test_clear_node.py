"""A kvstore process that was away, or has lost Redis, while a tenant was cleared."""

from __future__ import annotations

from pathlib import Path

from services.common.blocks import TENANT_TAG_BYTES, owner_of
from services.common.generation_table import GenerationTable
from services.common.keys import KeySpace, location_key
from services.common.redis_client import RedisClient, connect_redis
from services.common.security import MeshSecret
from services.common.transfer.grpc_client import GrpcTransport
from services.common.transfer.protocol import PushRequest
from services.kvstore.ssd_keys import OwnerKeys
from tests.common.transfer.blocks import SECRET, chain, header, payload
from tests.common.transfer.conftest import shown
from tests.common.transfer.test_transports import BLOCK_BYTES
from tests.kvstore.conftest import KvStoreProcess, StartKvStore
from tests.kvstore.test_node import announced, stats
from tests.kvstore.test_ssd_node import flags, tiers
from tests.support.valkey import Valkey
from tests.support.waiting import eventually_async

MINE, OTHER = chain(10, 1), chain(10, 2)
TAGS = {1: b"a" * TENANT_TAG_BYTES, 2: b"b" * TENANT_TAG_BYTES}


async def push(client: GrpcTransport, node: KvStoreProcess, number: int, generation: int = 0) -> int:
    """Push one tenant's chain; how many blocks the node has kept."""
    ids = chain(10, number)
    data = [bytearray(payload(block_id, BLOCK_BYTES)) for block_id in ids]
    owner = owner_of(TAGS[number], generation)
    headers = [header(ids, i, bytes(block), owner) for i, block in enumerate(data)]
    return (await client.push(node.peer, PushRequest(headers, shown(data), 0, 10.0))).accepted


async def listed_ever(redis: RedisClient) -> set[bytes]:
    """Blocks that any announcement in the change stream has added."""
    keys = KeySpace().shard_of(location_key("kvstore", "kv-1"))
    added = [fields[b"a"] for _, fields in await redis.xrange(keys.changes)]
    return {adds[at : at + 16] for adds in added for at in range(0, len(adds), 17)}


async def test_a_node_that_was_away_forgets_before_it_announces(
    start_kvstore: StartKvStore, valkey: Valkey, tmp_path: Path
) -> None:
    client, redis = GrpcTransport(MeshSecret(SECRET)), connect_redis(valkey.url)
    node = start_kvstore("grpc", *flags(tmp_path / "ssd"))
    assert [await push(client, node, number) for number in TAGS] == [10, 10]

    async def spilled() -> bool:
        return (await stats(node)).ssd.blocks == 20

    await eventually_async(spilled)
    node.end()
    outcome = await GenerationTable(redis).clear(TAGS[1], timeout_s=4)
    assert list(outcome.missing) == ["kvstore/kv-1"], "a node that has crashed is named"
    await redis.delete(KeySpace().shard_of(location_key("kvstore", "kv-1")).changes)
    node = start_kvstore("grpc", *flags(tmp_path / "ssd"))

    async def is_announced() -> bool:
        return await announced(valkey) == set(OTHER)

    await eventually_async(is_announced)
    assert await listed_ever(redis) == set(OTHER), "what was cleared has not been announced, however briefly"
    assert await tiers(client, node, MINE) == []
    assert await tiers(client, node, OTHER) == ["ssd"] * 10
    counts = await stats(node)
    assert (counts.ssd.blocks, counts.ssd.owners) == (10, 1)
    assert await push(client, node, 1) == 0
    assert await push(client, node, 1, outcome.generation) == 10
    again = await GenerationTable(redis).clear(TAGS[1], timeout_s=30)
    assert again.done == ("kvstore/kv-1",)
    assert node.terminate() == 0
    keys = OwnerKeys(tmp_path / "ssd" / "keys", MeshSecret(SECRET).storage_key)
    assert keys.owners == [owner_of(TAGS[2], 0)]
    keys.close()
    await client.close()
    await redis.aclose()


async def test_a_node_tells_a_redis_that_forgot(start_kvstore: StartKvStore, valkey: Valkey) -> None:
    client, redis = GrpcTransport(MeshSecret(SECRET)), connect_redis(valkey.url)
    node = start_kvstore("grpc")
    assert await push(client, node, 1) == 10
    outcome = await GenerationTable(redis).clear(TAGS[1], timeout_s=30)
    assert outcome.done == ("kvstore/kv-1",)
    valkey.restart(empty=True)
    probe = connect_redis(valkey.url)

    async def is_back() -> bool:
        return bool(await probe.hget(KeySpace().generations().table, TAGS[1]) == b"%d" % outcome.generation)

    await eventually_async(is_back)
    assert await push(client, node, 1) == 0
    for one in (client.close, redis.aclose, probe.aclose):
        await one()


async def test_a_node_without_redis_starts_and_serves_once_it_is_there(
    start_kvstore: StartKvStore, valkey: Valkey, tmp_path: Path
) -> None:
    client = GrpcTransport(MeshSecret(SECRET))
    valkey.kill()
    node = start_kvstore("grpc", *flags(tmp_path / "ssd"))
    assert await push(client, node, 2) == 10
    valkey.start()

    async def is_announced() -> bool:
        return await announced(valkey) == set(OTHER)

    await eventually_async(is_announced)
    await client.close()
