"""A node and members of its mesh that are out of their mind: what they say harms nobody else, and nothing stays."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest
from kvmesh.v1 import kvstore_pb2, kvstore_pb2_grpc, transfer_pb2, transfer_pb2_grpc

from services.common.blocks import TENANT_TAG_BYTES, join_ids, owner_of
from services.common.generations import MAX_GENERATION
from services.common.rpc import call_metadata, open_channel
from services.common.security import MeshSecret
from services.common.transfer import wire
from services.common.transfer.errors import PeerLost, TransferError
from services.common.transfer.grpc_client import EPOCH_METADATA
from services.common.transfer.header import BlockFormat, Segment, make_header
from services.common.transfer.protocol import PeerAddress, PushRequest, PushResult
from services.common.transfer.shm_client import ShmTransport
from services.common.transfer.shm_connection import ShmConnection
from tests.common.transfer.blocks import SECRET, chain, header, payload
from tests.common.transfer.conftest import shown, shown_memory
from tests.common.transfer.test_transports import BLOCK_BYTES, Pulled, pull
from tests.kvstore.conftest import KvStoreProcess, StartKvStore
from tests.kvstore.test_node import push, stats
from tests.support.waiting import SOON_S, eventually_async

_SECRET = MeshSecret(SECRET)
_IDS = chain(6)


@asynccontextmanager
async def member(node: KvStoreProcess) -> AsyncIterator[tuple[ShmConnection, asyncio.Future[TransferError]]]:
    """An authenticated connection over which a test says what it likes, and how it failed."""
    connection = await ShmConnection.connect(node.peer.grpc_address, _SECRET.pull_key, [shown_memory()])
    failed: asyncio.Future[TransferError] = asyncio.get_running_loop().create_future()
    connection.on_failed = failed.set_result
    connection.start()
    connection.begin()
    yield connection, failed
    connection.fail(PeerLost("end of the test"))


async def assert_well(client: ShmTransport, node: KvStoreProcess, blocks: int = len(_IDS)) -> None:
    """The node serves its blocks, lends none, and has nothing to report."""

    async def idle() -> bool:
        now = await stats(node)
        return (now.open_leases, now.leased_blocks, now.partial_blocks) == (0, 0, 0)

    await eventually_async(idle)
    pulled = Pulled(_IDS)
    assert (await pull(client, node.peer, pulled, epoch=0)).num_blocks == len(_IDS)
    pulled.assert_good(len(_IDS))
    assert (await stats(node)).ram_blocks == blocks
    assert [line for line in node.log() if line["level"] == "error"] == []


@asynccontextmanager
async def filled(start_kvstore: StartKvStore) -> AsyncIterator[tuple[KvStoreProcess, ShmTransport]]:
    """A node with a chain, and a peer in its right mind."""
    node = start_kvstore("auto", "--ram-bytes", str(2**26))
    client = ShmTransport(_SECRET.pull_key, [shown_memory()])
    assert (await push(client, node, _IDS)).accepted == len(_IDS)
    yield node, client
    await client.close()


def _pull(number: int, deadline_s: float) -> wire.Pull:
    return wire.Pull(number, join_ids(_IDS), 0, deadline_s, "", "")


async def test_what_no_peer_may_say_ends_its_connection(start_kvstore: StartKvStore) -> None:
    offered = [header(_IDS, 0, payload(_IDS[0], BLOCK_BYTES))]
    place = [(0, 0, BLOCK_BYTES)]
    async with filled(start_kvstore) as (node, client):
        for messages in (
            [_pull(1, math.nan)],
            [_pull(1, 5.0), _pull(1, 5.0)],
            [wire.Pull(1, join_ids(_IDS), 0, 5.0, "", "", [], (0, 0))],
            [wire.WasRead(join_ids(_IDS), math.nan, "", "")],
            [wire.ShownOffer(1, offered, place, 0, math.nan, "")],
            [wire.ShownOffer(1, offered, place * 2, 0, 5.0, "")],
        ):
            async with member(node) as (connection, failed):
                for message in messages:
                    connection.send(message)
                async with asyncio.timeout(60):
                    assert isinstance(await failed, PeerLost), messages
        await assert_well(client, node)


@pytest.mark.parametrize("deadline_s", [math.inf, -math.inf, 1e300])
async def test_no_lease_is_longer_than_the_node_allows(start_kvstore: StartKvStore, deadline_s: float) -> None:
    node = start_kvstore("auto", "--ram-bytes", str(2**26), "--max-lease-s", "0.5")
    client = ShmTransport(_SECRET.pull_key, [shown_memory()])
    await push(client, node, _IDS)
    async with member(node) as (connection, _):
        connection.send(_pull(1, deadline_s))
        await assert_well(client, node)
    await client.close()


async def test_notes_of_reads_that_cannot_have_been(start_kvstore: StartKvStore) -> None:
    async with filled(start_kvstore) as (node, client):
        async with member(node) as (connection, failed):
            for duration_s in (math.inf, -math.inf, 1e300, -1.0):
                connection.send(wire.WasRead(join_ids(_IDS), duration_s, "no traceparent", "r" * 5000))
            connection.send(wire.WasRead(join_ids(chain(4096, 9)), 0.1, "", ""))
            connection.send(wire.WasRead(join_ids(_IDS * 600), 0.1, "", "", (65533, 1)))
            await assert_well(client, node)
            assert not failed.done()
        (ram,) = (pulls for pulls in (await stats(node)).pulls if pulls.tier == "ram")
        assert math.isfinite(ram.p99_s)


async def test_blocks_of_one_byte_stop_nobody(start_kvstore: StartKvStore) -> None:
    node = start_kvstore("auto", "--ram-bytes", str(2**29))
    tiny = BlockFormat(b"m" * 16, "uint8", 1, 1, (Segment(0, 1, (1,), "uint8"),))
    ids = chain(1, 7)
    async with member(node) as (_, failed):
        client = ShmTransport(_SECRET.pull_key, [shown_memory()])
        started_s = time.monotonic()
        offer = PushRequest([make_header(tiny, ids[0], memoryview(b"x"), starts_chain=True)], shown([b"x"]), 0, 60.0)
        assert await client.push(node.peer, offer) == PushResult(1, 0)
        assert time.monotonic() - started_s < SOON_S
        assert not failed.done()
        await client.close()


async def test_copies_from_addresses_that_are_none(start_kvstore: StartKvStore) -> None:
    """Each costs the copy alone; one from a good address comes afterwards."""
    async with filled(start_kvstore) as (source, client):
        node = start_kvstore("auto", "--ram-bytes", str(2**26), name="kv-2")
        headers = [header(_IDS, i, payload(block_id, BLOCK_BYTES)) for i, block_id in enumerate(_IDS)]
        odd = ("127.0.0.1:99999", f"127.0.0.1:{'9' * 5000}", "127.0.0.1:²", "\0:5", "é:5", ":", "")
        async with open_channel(node.ready["address"]) as channel:
            stub = kvstore_pb2_grpc.KvStoreStub(channel)

            async def ask(peer: PeerAddress) -> None:
                request = kvstore_pb2.ReplicateRequest(
                    headers=headers,
                    created_s=2**64 - 1,
                    pull_address=peer.pull_address,
                    grpc_address=peer.grpc_address,
                )
                await stub.Replicate(request, timeout=30, metadata=call_metadata(_SECRET))

            for number, address in enumerate(odd, 1):
                await ask(PeerAddress(address, address))

                async def failed(number: int = number) -> bool:
                    return (await stats(node)).replication.failed_copies == number

                await eventually_async(failed)
            await ask(source.peer)

            async def copied() -> bool:
                return (await stats(node)).ram_blocks == len(_IDS)

            await eventually_async(copied)
        await assert_well(client, node)


async def test_rpcs_with_fields_that_are_no_numbers(start_kvstore: StartKvStore) -> None:
    async with filled(start_kvstore) as (node, client):
        async with open_channel(node.ready["address"]) as channel:
            transfer, kvstore = transfer_pb2_grpc.BlockTransferStub(channel), kvstore_pb2_grpc.KvStoreStub(channel)
            metadata = call_metadata(_SECRET)

            async def no_chunks() -> AsyncIterator[transfer_pb2.PushChunk]:
                for _ in ():
                    yield transfer_pb2.PushChunk()

            async def refused(call: grpc.aio.Call) -> bool:
                return await call.code() == grpc.StatusCode.INVALID_ARGUMENT

            wanted = transfer_pb2.PullRequest(block_ids=join_ids(_IDS), deadline_s=math.nan)
            assert await refused(transfer.Pull(wanted, timeout=30, metadata=metadata))
            assert await refused(transfer.Push(no_chunks(), timeout=30, metadata=(*metadata, (EPOCH_METADATA, "x"))))
            for generation in (MAX_GENERATION + 1, 2**64 - 1):
                owner = owner_of(bytes(TENANT_TAG_BYTES), generation)
                clear = kvstore.Clear(kvstore_pb2.ClearRequest(owner_digest=owner), timeout=30, metadata=metadata)
                assert await refused(clear)
        assert (await stats(node)).cleared_tenants == 0
        await assert_well(client, node)
