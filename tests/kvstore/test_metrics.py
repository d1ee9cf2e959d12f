"""The metrics that docs/operations.md lists for a node: there from the start, and moving when they should."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import grpc.aio
from kvmesh.v1 import transfer_pb2, transfer_pb2_grpc

from services.common.blocks import TENANT_TAG_BYTES, join_ids
from services.common.generation_table import GenerationTable
from services.common.redis_client import connect_redis
from services.common.rpc import call_metadata, open_channel
from services.common.security import MeshSecret
from services.common.transfer.grpc_client import GrpcTransport
from tests.common.transfer.blocks import SECRET, chain
from tests.kvstore.conftest import KvStoreProcess, StartKvStore
from tests.kvstore.test_node import push
from tests.kvstore.test_ssd_node import tiers
from tests.support.mesh import scrape, total
from tests.support.valkey import Valkey
from tests.support.waiting import eventually_async

DOC = Path(__file__).parents[2] / "docs/operations.md"
HISTOGRAMS = ("kvmesh_kvstore_pull_seconds", "kvmesh_kvstore_spill_seconds")
# What a healthy node with a quiet neighbourhood never counts; tests of faults, parts and copies move these.
NOT_MOVED = (
    "kvmesh_kvstore_ssd_switched_off_total",
    "kvmesh_kvstore_ssd_discarded_segments_total",
    "kvmesh_kvstore_dropped_partial_blocks_total",
    "kvmesh_kvstore_dropped_blocks_total",
    "kvmesh_kvstore_copied_blocks_total",
    "kvmesh_kvstore_open_leases",
    "kvmesh_kvstore_replication_asked_total",
    "kvmesh_kvstore_replication_refused_total",
    "kvmesh_kvstore_replication_failures_total",
    "kvmesh_kvstore_replicated_blocks_total",
    "kvmesh_kvstore_replicated_bytes_total",
)


def listed() -> dict[str, bool]:
    """Names of a node's metrics in the documentation, and whether they are by tier."""
    found = re.findall(r"`(kvmesh_kvstore_\w+)(\{tier\})?", DOC.read_text())
    return {name: bool(tier) for name, tier in sorted(found)}


def flags(path: Path) -> tuple[str, ...]:
    """RAM for 42 blocks above an SSD for some 100."""
    space = ("--ssd-bytes", str(24 * 2**20), "--ssd-segment-bytes", str(4 * 2**20))
    return ("--ram-bytes", str(8 * 2**20), "--ssd-path", str(path), *space)


async def page(node: KvStoreProcess) -> dict[str, float]:
    return await asyncio.to_thread(scrape, node.ready["metrics"])


async def until(node: KvStoreProcess, name: str, wanted: float, **labels: str) -> None:
    """Wait until a metric has this value at least."""

    async def there() -> bool:
        return total(await page(node), name, **labels) >= wanted

    await eventually_async(there, 10.0)


async def work(node: KvStoreProcess, valkey: Valkey) -> None:
    """Something of everything."""
    client, redis = GrpcTransport(MeshSecret(SECRET)), connect_redis(valkey.url)
    stored = 0
    for number in range(16):
        assert (await push(client, node, chain(10, number))).accepted == 10
        stored += 10
        await until(node, "kvmesh_kvstore_spilled_blocks_total", stored)
    assert await tiers(client, node, chain(10, 15)) == ["ram"] * 10
    assert "ssd" in await tiers(client, node, chain(10, 10))
    assert await tiers(client, node, chain(10, 77)) == []
    assert (await push(client, node, chain(6, 50), first=2)).accepted == 0
    assert (await push(client, node, chain(4, 51), spoil=2)).accepted == 2
    outcome = await GenerationTable(redis).clear(bytes(TENANT_TAG_BYTES), timeout_s=30)
    assert outcome.done == ("kvstore/kv-1",)
    await client.close()
    await redis.aclose()


async def test_every_listed_metric_is_there_and_moves(
    start_kvstore: StartKvStore, valkey: Valkey, tmp_path: Path
) -> None:
    node = start_kvstore("grpc", *flags(tmp_path / "ssd"))
    names = listed()
    assert len(names) > 15
    first = await page(node)
    series = {re.split(r"[{ ]", name)[0] for name in first}
    assert [name for name in names if name not in series and name not in HISTOGRAMS] == []
    await work(node, valkey)
    last = await page(node)
    for name, by_tier in names.items():
        counted = f"{name}_count" if name in HISTOGRAMS else name
        if "stored" in name:
            assert total(last, name) == 0, f"{name}: everything was cleared"
        elif name not in NOT_MOVED:
            for labels in ({"tier": "ram"}, {"tier": "ssd"}) if by_tier else ({},):
                assert total(last, counted, **labels) > total(first, counted, **labels), (name, labels)
    assert total(last, "kvmesh_kvstore_rejected_blocks_total", reason="no parent or no room") > 0
    assert total(last, "kvmesh_kvstore_verification_failures_total", reason="checksum") == 1
    assert total(last, "kvmesh_generations_followed_total") == 1


async def test_leases_are_counted_while_they_last(start_kvstore: StartKvStore) -> None:
    node = start_kvstore("grpc", "--ram-bytes", str(64 * 2**20))
    client = GrpcTransport(MeshSecret(SECRET))
    ids = chain(60)
    assert (await push(client, node, ids)).accepted == 60
    async with open_channel(node.ready["address"]) as channel:
        call = transfer_pb2_grpc.BlockTransferStub(channel).Pull(
            transfer_pb2.PullRequest(block_ids=join_ids(ids), deadline_s=20),
            metadata=call_metadata(MeshSecret(SECRET)),
        )
        assert await call.read() is not grpc.aio.EOF
        await until(node, "kvmesh_kvstore_open_leases", 1)
        call.cancel()

    async def ended() -> bool:
        return total(await page(node), "kvmesh_kvstore_open_leases") == 0

    await eventually_async(ended, 10.0)
    await client.close()
