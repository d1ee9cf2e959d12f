"""Nodes that copy hot chains from each other: real processes, a real Valkey."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence

import grpc.aio
import pytest
from kvmesh.v1 import kvstore_pb2, kvstore_pb2_grpc

from services.common.blocks import BlockId
from services.common.redis_client import connect_redis
from services.common.registry import RegistryWatcher
from services.common.rendezvous import ranking
from services.common.rpc import call_metadata, open_channel
from services.common.security import MeshSecret
from services.common.transfer.header import NO_OWNER
from services.common.transfer.protocol import PullResult, PushRequest, PushResult, Transport
from tests.common.transfer.blocks import SECRET, chain, header, payload
from tests.common.transfer.conftest import open_transport, shown, transport
from tests.common.transfer.test_transports import BLOCK_BYTES, Pulled, pull
from tests.kvstore.conftest import KvStoreProcess, StartKvStore
from tests.kvstore.ssd import owner
from tests.kvstore.test_node import announced, stats
from tests.support.mesh import scrape, total
from tests.support.valkey import Valkey
from tests.support.waiting import eventually_async

__all__ = ["transport"]

# A window so short that the next node is asked soon, and few pulls that make a chain hot.
HOT = ("--replicate-leases", "4", "--replicate-window-s", "1.5")


@pytest.fixture(params=["ucx", "grpc"])
def transport_name(request: pytest.FixtureRequest) -> str:
    """Without shared memory every puller counts as one of another host."""
    return str(request.param)


async def push(client: Transport, node: KvStoreProcess, ids: Sequence[BlockId], of: bytes = NO_OWNER) -> PushResult:
    data = [payload(block_id, BLOCK_BYTES) for block_id in ids]
    headers = [header(list(ids), i, block, of) for i, block in enumerate(data)]
    return await client.push(node.peer, PushRequest(headers, shown(data), 0, 10.0))


async def replication(node: KvStoreProcess) -> kvstore_pb2.ReplicationStats:
    return (await stats(node)).replication


async def ask(
    node: KvStoreProcess,
    ids: Sequence[BlockId],
    source: KvStoreProcess,
    *,
    of: bytes = NO_OWNER,
    epoch: int = 0,
    secret: str = SECRET,
    headers: Sequence[bytes] | None = None,
) -> kvstore_pb2.ReplicateResponse:
    """Ask `node` for a copy of what `source` has, as another node would."""
    if headers is None:
        headers = [header(list(ids), i, payload(one, BLOCK_BYTES), of) for i, one in enumerate(ids)]
    request = kvstore_pb2.ReplicateRequest(
        headers=headers,
        created_s=1_700_000_000,
        source_id="kv-1",
        source_epoch=epoch,
        pull_address=source.peer.pull_address,
        grpc_address=source.peer.grpc_address,
    )
    async with open_channel(node.ready["address"]) as channel:
        return await kvstore_pb2_grpc.KvStoreStub(channel).Replicate(
            request, timeout=30, metadata=call_metadata(MeshSecret(secret))
        )


async def held(client: Transport, node: KvStoreProcess, ids: list[BlockId]) -> int:
    """Leading blocks that the node serves, every byte compared."""
    pulled = Pulled(ids)
    count = (await pull(client, node.peer, pulled, epoch=0)).num_blocks
    pulled.assert_good(count)
    return count


async def test_a_hot_prefix_is_copied_and_nothing_else(
    transport: Transport, transport_name: str, start_kvstore: StartKvStore, valkey: Valkey
) -> None:
    first = start_kvstore(transport_name, *HOT)
    second = start_kvstore(transport_name, *HOT, name="kv-2")
    ids, cold = chain(20), chain(5, 1)
    await push(transport, first, ids)
    await push(transport, first, cold)
    await pull(transport, first.peer, Pulled(ids), epoch=0)
    await pull(transport, first.peer, Pulled(cold), epoch=0)

    async def copied() -> bool:
        assert await pull(transport, first.peer, Pulled(ids[:12]), epoch=0) == PullResult(12, "")
        return (await replication(second)).replicated_blocks >= 12

    await eventually_async(copied)
    told = await replication(second)
    assert (told.replicated_blocks, told.replicated_bytes, told.failed_copies) == (12, 12 * BLOCK_BYTES, 0)
    asked = await replication(first)
    assert asked.asked_copies == 1
    assert asked.declined_copies == 0
    assert await held(transport, second, ids) == 12
    assert await held(transport, second, cold) == 0

    async def listed() -> bool:
        return await announced(valkey, "kv-2") == set(ids[:12])

    await eventually_async(listed)
    asking, copying = scrape(first.ready["metrics"]), scrape(second.ready["metrics"])
    assert total(asking, "kvmesh_kvstore_replication_asked_total", answer="accepted") == 1
    assert total(copying, "kvmesh_kvstore_replicated_blocks_total") == 12
    assert total(copying, "kvmesh_kvstore_replicated_bytes_total") == 12 * BLOCK_BYTES
    lines = [line for line in second.log() if line["event"] == "a chain was copied"]
    assert [(line["kvstore_id"], line["blocks"], line["error"]) for line in lines] == [("kv-1", 12, "")]
    assert all(block_id.hex() not in str(first.log() + second.log()) for block_id in ids)


async def test_copies_end_at_the_bound(start_kvstore: StartKvStore) -> None:
    """Four nodes, two of which the chain prefers; all holders are pulled from until each has asked whom it may."""
    ids = chain(6)
    order = ranking(ids[0], {f"kv-{i}": 1.0 for i in range(1, 5)})
    nodes = {name: start_kvstore("grpc", *HOT, name=name) for name in order}
    async with open_transport("grpc", MeshSecret(SECRET)) as client:
        await push(client, nodes[order[-1]], ids)

        async def asked(count: int) -> bool:
            for node in nodes.values():
                assert await held(client, node, ids) in (0, 6)
            return sum([(await replication(node)).asked_copies for node in nodes.values()]) >= count

        # The first node asks both, and each of these asks the other.
        await eventually_async(lambda: asked(4))
        until_s = time.monotonic() + 3
        while time.monotonic() < until_s:
            assert not await asked(5), "everybody who may have the chain has it"
        counts = {name: await replication(node) for name, node in nodes.items()}
        assert [counts[name].replicated_blocks for name in order] == [6, 6, 0, 0]
        assert [counts[name].asked_copies for name in order] == [1, 1, 0, 2]
        assert all(one.failed_copies == one.declined_copies == 0 for one in counts.values())
        assert [await held(client, nodes[name], ids) for name in order] == [6, 6, 0, 6]


async def test_an_ask_is_answered_at_once_and_held_blocks_do_not_travel(
    transport: Transport, transport_name: str, start_kvstore: StartKvStore
) -> None:
    first, second = start_kvstore(transport_name), start_kvstore(transport_name, name="kv-2")
    ids = chain(16)
    await push(transport, first, ids)
    await push(transport, second, ids[:5])
    answer = await ask(second, ids, first)
    assert (answer.held_blocks, answer.refused) == (5, "")

    async def done() -> bool:
        return (await replication(second)).replicated_blocks == 11

    await eventually_async(done)
    assert await held(transport, second, ids) == 16
    assert (await ask(second, ids, first)).held_blocks == 16


async def test_what_is_no_chain_or_comes_from_outside_is_refused(start_kvstore: StartKvStore) -> None:
    first, second = start_kvstore("grpc"), start_kvstore("grpc", "--replicate-bytes-per-s", "0", name="kv-2")
    ids = chain(4)
    headers = [header(ids, i, payload(one, BLOCK_BYTES)) for i, one in enumerate(ids)]
    for wrong in ([], [b"x" * 200], headers[1:], [headers[0]] * 1025, [headers[0], b"rubbish" * 30]):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(first, ids, second, headers=wrong)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ask(first, ids, second, secret="the secret of another mesh")
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert (await ask(second, ids, first)).refused == "off"
    assert (await replication(second)).refused_copies == 1
    assert (await stats(first)).ram_blocks == 0


async def test_a_lost_source_leaves_a_good_prefix_and_is_counted(
    transport: Transport, transport_name: str, start_kvstore: StartKvStore
) -> None:
    first = start_kvstore(transport_name)
    # So slow that the source is killed in between.
    second = start_kvstore(transport_name, "--replicate-bytes-per-s", str(2**20), name="kv-2")
    ids = chain(64) + chain(64, 1)
    await push(transport, first, ids[:64])
    wrong_epoch = await ask(second, ids[:64], first, epoch=77)
    assert wrong_epoch.refused == ""

    async def failures(count: int) -> bool:
        return (await replication(second)).failed_copies == count

    await eventually_async(lambda: failures(1))
    assert await held(transport, second, ids[:64]) == 0
    first.process.send_signal(signal.SIGKILL)
    await ask(second, ids[:64], first)
    await eventually_async(lambda: failures(2))
    assert (await replication(second)).replicated_blocks == 0
    assert (await stats(second)).ram_blocks == 0
    assert total(scrape(second.ready["metrics"]), "kvmesh_kvstore_replication_failures_total") == 2


async def test_waiting_copies_and_their_pace_are_bounded(
    transport: Transport, transport_name: str, start_kvstore: StartKvStore
) -> None:
    first = start_kvstore(transport_name)
    second = start_kvstore(transport_name, "--replicate-bytes-per-s", str(2**20), name="kv-2")
    chains = [chain(8, number) for number in range(12)]
    for ids in chains:
        await push(transport, first, ids)
    started_s = time.monotonic()
    answers = [(await ask(second, ids, first)).refused for ids in chains]
    # One under way, four that wait, and one more for each whose time has passed meanwhile.
    passed = (time.monotonic() - started_s) * 2**20 / (8 * BLOCK_BYTES)
    assert 4 <= answers.count("") <= 6 + passed
    assert answers.count("busy") == 12 - answers.count("")
    assert (await replication(second)).refused_copies == answers.count("busy")
    counted = total(scrape(second.ready["metrics"]), "kvmesh_kvstore_replication_refused_total", reason="busy")
    assert counted == answers.count("busy")

    async def three_chains() -> bool:
        return (await replication(second)).replicated_blocks >= 24

    await eventually_async(three_chains)
    # Two chains went before the third began.
    assert time.monotonic() - started_s >= 2 * 8 * BLOCK_BYTES / 2**20


async def test_a_cleared_owner_is_not_brought_back_and_quotas_hold(
    transport: Transport, transport_name: str, start_kvstore: StartKvStore
) -> None:
    first = start_kvstore(transport_name)
    second = start_kvstore(transport_name, "--owner-ram-bytes", str(4 * BLOCK_BYTES), name="kv-2")
    old, new = owner("t", 1), owner("t", 2)
    ids, later = chain(6), chain(6, 1)
    await push(transport, first, ids, old)
    await push(transport, first, later, new)
    async with open_channel(second.ready["address"]) as channel:
        await kvstore_pb2_grpc.KvStoreStub(channel).Clear(
            kvstore_pb2.ClearRequest(owner_digest=new), timeout=30, metadata=call_metadata(MeshSecret(SECRET))
        )
    await ask(second, ids, first, of=old)

    async def failures(count: int) -> bool:
        return (await replication(second)).failed_copies == count

    await eventually_async(lambda: failures(1))
    assert (await stats(second)).ram_blocks == 0
    await ask(second, later, first, of=new)
    await eventually_async(lambda: failures(2))
    assert await held(transport, second, later) == 4


async def test_nodes_know_each_other_by_the_registry(start_kvstore: StartKvStore, valkey: Valkey) -> None:
    """Join, clean leave: withdrawn before the process ends, and gone from what others see."""
    start_kvstore("grpc")
    second = start_kvstore("grpc", name="kv-2")
    client = connect_redis(valkey.url)
    watcher = RegistryWatcher(client)
    gone_while_alive: list[bool] = []
    watcher.subscribe(lambda change: gone_while_alive.append(second.process.poll() is None) if change.gone else None)
    following = asyncio.ensure_future(watcher.run())

    async def known(count: int) -> bool:
        return len(watcher.records) == count

    await eventually_async(lambda: known(2))
    second.process.send_signal(signal.SIGTERM)
    await eventually_async(lambda: known(1))
    assert gone_while_alive == [True], "others know before the node refuses anything"
    assert await asyncio.to_thread(second.process.wait, 30) == 0
    following.cancel()
    await client.aclose()
