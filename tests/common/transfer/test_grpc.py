"""What only gRPC can get wrong: streams whose other end says nothing more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc.aio
import pytest
import pytest_asyncio
from kvmesh.v1 import transfer_pb2, transfer_pb2_grpc

from services.common.rpc import MeshServer, call_metadata, open_channel
from services.common.security import MeshSecret
from services.common.transfer.grpc_client import GrpcTransport
from services.common.transfer.grpc_server import BlockTransferServicer
from services.common.transfer.protocol import STOP_DEADLINE, PeerAddress, PullRequest
from tests.common.transfer.blocks import EPOCH, SECRET, chain
from tests.common.transfer.holder import Holder

_MAX_OPERATION_S = 0.3


@pytest_asyncio.fixture
async def address() -> AsyncIterator[str]:
    """A server in this process that bounds every operation, and never finds a lease."""
    holder = Holder(1, 192 * 64, hang=True, spoil=-1, commit_s=0.0)
    server = MeshServer("127.0.0.1:0", secret=MeshSecret(SECRET))
    server.add(
        transfer_pb2_grpc.add_BlockTransferServicer_to_server,
        BlockTransferServicer(holder, holder, max_operation_s=_MAX_OPERATION_S),
        transfer_pb2.DESCRIPTOR.services_by_name["BlockTransfer"].full_name,
    )
    yield await server.start()
    await server.stop(0)


async def test_a_pusher_that_falls_silent_is_told_that_its_time_is_up(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def silence() -> AsyncIterator[transfer_pb2.PushChunk]:
        await asyncio.sleep(5)
        yield transfer_pb2.PushChunk()

    async with open_channel(address) as channel:
        push = transfer_pb2_grpc.BlockTransferStub(channel).Push(
            silence(), metadata=call_metadata(MeshSecret(SECRET)), timeout=30
        )
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await push
    assert failed.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert "did not end in time" in str(failed.value.details())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_lease_that_takes_too_long_is_a_short_answer(address: str) -> None:
    transport = GrpcTransport(MeshSecret(SECRET))
    request = PullRequest(chain(1), EPOCH, 5.0)
    result = await transport.pull(PeerAddress("", address), request, [memoryview(bytearray(192 * 64))], _nothing)
    assert (result.num_blocks, result.stop) == (0, STOP_DEADLINE)
    await transport.close()


def _nothing(index: int, header: bytes, tier: str) -> None:
    raise AssertionError("a block has come")
