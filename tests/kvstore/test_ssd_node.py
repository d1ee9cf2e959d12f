"""A kvstore process with an SSD tier, as its peers and operators see it."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import cast

from kvmesh.v1 import kvstore_pb2, kvstore_pb2_grpc

from services.common.announcements import Tier
from services.common.blocks import TENANT_TAG_BYTES, BlockId, owner_of
from services.common.keys import KeySpace, location_key
from services.common.redis_client import connect_redis
from services.common.rpc import call_metadata, open_channel
from services.common.security import MeshSecret
from services.common.transfer.grpc_client import GrpcTransport
from services.common.transfer.protocol import Transport
from tests.common.transfer.blocks import SECRET, chain
from tests.common.transfer.conftest import transport, transport_name
from tests.common.transfer.test_transports import Pulled, pull
from tests.kvstore.conftest import KvStoreProcess, StartKvStore
from tests.kvstore.test_node import push, stats
from tests.support.mesh import scrape, total
from tests.support.valkey import Valkey
from tests.support.waiting import eventually_async

__all__ = ["transport", "transport_name"]

_CHAINS = 12
_RAM_BYTES = 8 * 2**20


def flags(path: Path) -> tuple[str, ...]:
    return ("--ram-bytes", str(_RAM_BYTES), "--ssd-path", str(path), "--ssd-bytes", str(64 * 2**20))


async def announced_tiers(valkey: Valkey) -> dict[bytes, int]:
    """What the index lists for the node."""
    client = connect_redis(valkey.url)
    location = location_key("kvstore", "kv-1")
    found = await client.hgetall(KeySpace().shard_of(location).blocks(location))
    await client.aclose()
    return {block_id: tier[0] for block_id, tier in cast(dict[bytes, bytes], found).items()}


async def fill(client: Transport, node: KvStoreProcess) -> None:
    """More than RAM holds, all of it on the SSD."""
    for number in range(_CHAINS):
        assert (await push(client, node, chain(10, number))).accepted == 10

        async def written(blocks: int = 10 * (number + 1)) -> bool:
            return (await stats(node)).ssd.blocks == blocks

        await eventually_async(written)


async def tiers(client: Transport, node: KvStoreProcess, ids: list[BlockId]) -> list[str]:
    """Tiers of the blocks that came, all of them good."""
    pulled = Pulled(ids)
    result = await pull(client, node.peer, pulled, epoch=0)
    pulled.assert_good(result.num_blocks)
    return pulled.tiers[: result.num_blocks]


async def test_ssd_hits_say_so_and_survive_restarts(
    transport: Transport, transport_name: str, start_kvstore: StartKvStore, valkey: Valkey, tmp_path: Path
) -> None:
    path = tmp_path / "ssd"
    node = start_kvstore(transport_name, *flags(path))
    await fill(transport, node)
    found = await tiers(transport, node, chain(10, 1))
    assert "ssd" in found
    assert len(found) == 10
    counts = await stats(node)
    assert counts.ssd.state == "on"
    assert counts.ssd_hit_blocks == found.count("ssd")
    assert counts.ssd.used_bytes <= counts.ssd.capacity_bytes <= 64 * 2**20
    assert await announced_tiers_settle(valkey, counts.ram_blocks)
    node.process.send_signal(signal.SIGKILL)
    node.process.wait(30)
    node = start_kvstore(transport_name, *flags(path))
    for number in range(_CHAINS):
        assert await tiers(transport, node, chain(10, number)) == ["ssd"] * 10
    listed = await announced_tiers(valkey)
    assert len(listed) == 10 * _CHAINS
    assert node.terminate() == 0


async def announced_tiers_settle(valkey: Valkey, ram_blocks: int) -> bool:
    """The index lists every block, those in RAM as such."""

    async def settled() -> bool:
        found = list((await announced_tiers(valkey)).values())
        return (found.count(Tier.RAM), len(found)) == (ram_blocks, 10 * _CHAINS)

    await eventually_async(settled)
    return True


async def test_what_ram_holds_is_written_before_a_node_ends(start_kvstore: StartKvStore, tmp_path: Path) -> None:
    client = GrpcTransport(MeshSecret(SECRET))
    node = start_kvstore("grpc", *flags(tmp_path / "ssd"))
    assert (await push(client, node, chain(10))).accepted == 10
    assert node.terminate() == 0
    node = start_kvstore("grpc", *flags(tmp_path / "ssd"))
    assert await tiers(client, node, chain(10)) == ["ssd"] * 10
    async with open_channel(node.ready["address"]) as channel:
        stub = kvstore_pb2_grpc.KvStoreStub(channel)
        secret = call_metadata(MeshSecret(SECRET))
        request = kvstore_pb2.ClearRequest(owner_digest=owner_of(bytes(TENANT_TAG_BYTES), 1))
        answer = await stub.Clear(request, metadata=secret, timeout=30)
        assert (answer.ram_blocks, answer.ssd_blocks, answer.destroyed_keys) == (10, 10, 1)
    assert await tiers(client, node, chain(10)) == []
    assert (await push(client, node, chain(10))).accepted == 0
    assert (await stats(node)).rejected_blocks > 0
    await client.close()


async def test_a_disk_that_fills_up_does_not_end_the_node(start_kvstore: StartKvStore, small_disk: Path) -> None:
    client = GrpcTransport(MeshSecret(SECRET))
    node = start_kvstore("grpc", *flags(small_disk / "kv"))
    for number in range(40):
        assert (await push(client, node, chain(10, number))).accepted == 10
    assert "ssd" not in await tiers(client, node, chain(10, 39))

    async def off() -> bool:
        return (await stats(node)).ssd.state != "on"

    await eventually_async(off)
    events = [line for line in node.log() if line["event"].startswith("ssd tier is switched off")]
    assert len(events) == 1
    assert "No space left" in events[0]["error"]
    await client.close()


async def test_a_disk_that_cannot_be_written_leaves_a_node_without_ssd(
    start_kvstore: StartKvStore, small_disk: Path
) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    client = GrpcTransport(MeshSecret(SECRET))
    node = start_kvstore("grpc", *flags(small_disk / "kv"))
    assert (await push(client, node, chain(10))).accepted == 10
    assert await tiers(client, node, chain(10)) == ["ram"] * 10
    assert any("Read-only" in line.get("error", "") for line in node.log())
    assert (await stats(node)).ssd.state == "OSError: Read-only file system"
    assert total(scrape(node.ready["metrics"]), "kvmesh_kvstore_ssd_switched_off_total") == 1
    await client.close()
