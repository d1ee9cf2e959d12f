"""A kvstore process as workers, routers and operators see it."""

from __future__ import annotations

import asyncio
import urllib.request

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvmesh.v1 import kvstore_pb2, kvstore_pb2_grpc

from services.common.blocks import BlockId
from services.common.keys import KeySpace, location_key
from services.common.redis_client import connect_redis
from services.common.registry import LocationRecord, RegistryWatcher
from services.common.rpc import call_metadata, open_channel
from services.common.security import MeshSecret
from services.common.transfer.grpc_client import GrpcTransport
from services.common.transfer.protocol import STOP_EPOCH, PullResult, PushRequest, PushResult, Transport
from services.common.transfer.shm_client import ShmTransport
from services.common.transfer.shm_directory import directory_supported
from tests.common.transfer.blocks import SECRET, chain, header, payload
from tests.common.transfer.conftest import shown, transport, transport_name
from tests.common.transfer.test_transports import BLOCK_BYTES, Pulled, pull
from tests.kvstore.conftest import KvStoreProcess, StartKvStore
from tests.support.processor_time import idle_share
from tests.support.valkey import Valkey
from tests.support.waiting import eventually, eventually_async

__all__ = ["transport", "transport_name"]

_TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def push(
    client: Transport, node: KvStoreProcess, ids: list[BlockId], first: int = 0, spoil: int | None = None
) -> PushResult:
    """Offer blocks `first` on of a chain; the payload of `spoil` has a flipped bit."""
    data = [bytearray(payload(block_id, BLOCK_BYTES)) for block_id in ids]
    headers = [header(ids, i, bytes(block)) for i, block in enumerate(data)]
    if spoil is not None:
        data[spoil][100] ^= 4
    request = PushRequest(headers[first:], shown(data[first:]), 0, 10.0, _TRACEPARENT)
    return await client.push(node.peer, request)


async def stats(node: KvStoreProcess) -> kvstore_pb2.StatsResponse:
    async with open_channel(node.ready["address"]) as channel:
        return await kvstore_pb2_grpc.KvStoreStub(channel).Stats(
            kvstore_pb2.StatsRequest(), metadata=call_metadata(MeshSecret(SECRET)), timeout=30
        )


async def announced(valkey: Valkey, name: str = "kv-1") -> set[bytes]:
    """Ids that the index lists for the node."""
    client = connect_redis(valkey.url)
    location = location_key("kvstore", name)
    found = await client.hkeys(KeySpace().shard_of(location).blocks(location))
    await client.aclose()
    return set(found)


async def test_push_pull_and_announcements(
    transport: Transport, transport_name: str, start_kvstore: StartKvStore, valkey: Valkey
) -> None:
    node = start_kvstore(transport_name)
    ids = chain(20)
    assert await push(transport, node, ids) == PushResult(20, 0)
    pulled = Pulled(ids)
    assert await pull(transport, node.peer, pulled, epoch=0, traceparent=_TRACEPARENT) == PullResult(20, "")
    pulled.assert_good(20)
    wrong = await pull(transport, node.peer, Pulled(ids), epoch=3)
    assert wrong == PullResult(0, STOP_EPOCH)

    async def is_announced() -> bool:
        return await announced(valkey) == set(ids)

    await eventually_async(is_announced)
    counts = await stats(node)
    assert (counts.ram_blocks, counts.hit_blocks, counts.pushed_blocks, counts.open_leases) == (20, 20, 20, 0)
    assert counts.miss_blocks == 20
    lines = [line for line in node.log() if line["event"] == "pull served"]
    assert lines[0]["request_id"] == "req-1"
    assert all(block_id.hex() not in str(node.log()) for block_id in ids)


@pytest.mark.skipif(not directory_supported(), reason="directories need x86-64")
async def test_peers_on_the_host_read_without_asking(start_kvstore: StartKvStore) -> None:
    node = start_kvstore("shm")
    ids = chain(20)
    writer, reader = GrpcTransport(MeshSecret(SECRET)), ShmTransport(MeshSecret(SECRET).pull_key, [])
    assert await push(writer, node, ids) == PushResult(20, 0)
    pulled = Pulled(ids)
    assert await pull(reader, node.peer, pulled, epoch=0) == PullResult(20, "")
    pulled.assert_good(20)
    assert reader.statistics().read_blocks == 20

    async def counted() -> bool:
        return (await stats(node)).hit_blocks == 20

    await eventually_async(counted)
    await writer.close()
    await reader.close()


async def test_the_set_stays_prefix_closed(
    transport: Transport, transport_name: str, start_kvstore: StartKvStore, valkey: Valkey
) -> None:
    node = start_kvstore(transport_name, "--ram-bytes", str(8 * 2**20))
    ids = chain(6)
    assert (await push(transport, node, ids, first=2)).accepted == 0
    assert (await push(transport, node, ids[:3])).accepted == 3
    assert (await push(transport, node, ids)).accepted == 6
    assert (await push(transport, node, chain(4, 1), spoil=2)).accepted == 2
    for number in range(2, 9):
        await push(transport, node, chain(10, number))
    counts = await stats(node)
    assert counts.evicted_blocks > 0
    assert counts.verification_failures == 1
    assert counts.rejected_blocks > 0
    assert counts.ram_bytes == counts.ram_blocks * BLOCK_BYTES <= counts.ram_capacity_bytes

    async def is_announced() -> bool:
        return len(await announced(valkey)) == counts.ram_blocks

    await eventually_async(is_announced)
    listed = await announced(valkey)
    for number in range(9):
        held = [block_id in listed for block_id in chain(10, number)]
        assert held == sorted(held, reverse=True)


async def test_it_registers_and_drains(
    transport: Transport, transport_name: str, start_kvstore: StartKvStore, valkey: Valkey
) -> None:
    node = start_kvstore(transport_name)
    await push(transport, node, chain(2))
    client = connect_redis(valkey.url)
    watcher = RegistryWatcher(client)
    following = asyncio.ensure_future(watcher.run())
    await eventually(lambda: "kvstore/kv-1" in watcher.records)
    record: LocationRecord = watcher.records["kvstore/kv-1"]
    assert (record.pull_address, record.transfer_grpc_address) == (node.peer.pull_address, node.peer.grpc_address)
    async with open_channel(node.ready["address"]) as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError):
            await kvstore_pb2_grpc.KvStoreStub(channel).Stats(kvstore_pb2.StatsRequest(), timeout=30)
    text = await asyncio.to_thread(_read, f"http://{node.ready['metrics']}/metrics")
    assert "kvmesh_kvstore_pushed_blocks_total" in text
    assert f'transport="{transport_name}"' in text
    assert await asyncio.to_thread(node.terminate) == 0
    await eventually(lambda: "kvstore/kv-1" not in watcher.records)
    assert await announced(valkey) == set()
    following.cancel()
    await client.aclose()


async def test_an_idle_node_uses_no_cpu(transport_name: str, start_kvstore: StartKvStore) -> None:
    node = start_kvstore(transport_name)
    assert await idle_share(node.process.pid, below=0.025) < 0.025


async def test_a_broken_start_says_why(start_kvstore: StartKvStore) -> None:
    first = start_kvstore("grpc")
    with pytest.raises(RuntimeError, match="cannot listen on"):
        start_kvstore("grpc", "--listen", first.ready["address"])
    with pytest.raises(RuntimeError, match="ram_bytes"):
        start_kvstore("grpc", "--ram-bytes", "12")


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as response:
        text: str = response.read().decode()
        return text
