"""What only UCX can get wrong: peers that fall silent at either end, strangers, handles that are used again."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.common.blocks import join_ids
from services.common.security import MeshSecret
from services.common.transfer import wire
from services.common.transfer.errors import PeerLost, ProtocolViolation
from services.common.transfer.protocol import PROTOCOL_VERSION, PeerAddress, PushRequest
from services.common.transfer.ucx_client import UcxTransport
from services.common.transfer.ucx_connection import UcxConnection
from services.common.transfer.ucx_reactor import UcxEndpoint, UcxReactor, transports
from tests.common.transfer.blocks import EPOCH, SECRET, chain, header, payload
from tests.common.transfer.conftest import HolderProcess, StartHolder
from tests.common.transfer.test_transports import BLOCK_BYTES, Pulled, pull
from tests.support.waiting import SOON_S, eventually

_KEY = MeshSecret(SECRET).pull_key


@pytest.fixture
def transport_name() -> str:
    return "ucx"


@pytest_asyncio.fixture
async def reactor() -> AsyncIterator[UcxReactor]:
    made = UcxReactor()
    yield made
    made.close()


async def _connect(reactor: UcxReactor, holder: HolderProcess) -> UcxConnection:
    port = int(holder.peer.pull_address.rpartition(":")[2])
    return await UcxConnection.connect(reactor.connect("127.0.0.1", port), _KEY)


async def test_a_silent_puller_holds_blocks_for_a_second_at_most(
    reactor: UcxReactor, start_holder: StartHolder
) -> None:
    """It never starts to read, so it neither receives nor answers heartbeats."""
    holder = start_holder("--blocks", "8")
    connection = await _connect(reactor, holder)
    connection.send(wire.Pull(1, join_ids(chain(8)), EPOCH, 30.0, "", ""))
    await eventually(lambda: holder.state()["open_leases"] == 1)
    started_s = time.monotonic()
    await eventually(lambda: holder.state()["open_leases"] == 0)
    assert time.monotonic() - started_s < SOON_S
    connection.fail(PeerLost("end of the test"))


async def test_a_silent_pusher_holds_room_for_a_second_at_most(reactor: UcxReactor, start_holder: StartHolder) -> None:
    holder = start_holder("--blocks", "0")
    connection = await _connect(reactor, holder)
    ids = chain(2)
    headers = [header(ids, i, payload(block_id, BLOCK_BYTES)) for i, block_id in enumerate(ids)]
    connection.send(wire.Offer(1, headers, EPOCH, 30.0, ""))
    await eventually(lambda: holder.state()["open_reservations"] == 1)
    started_s = time.monotonic()
    await eventually(lambda: holder.state()["open_reservations"] == 0)
    assert time.monotonic() - started_s < SOON_S
    assert holder.state()["pushed"] == []
    connection.fail(PeerLost("end of the test"))


async def test_connections_come_and_go(reactor: UcxReactor, start_holder: StartHolder) -> None:
    """UCX uses the handles of closed connections again; nothing of an earlier one may reach a later one."""
    holder = start_holder("--blocks", "4")
    for _ in range(25):
        transport = UcxTransport(reactor, _KEY)
        pulled = Pulled(chain(4))
        await pull(transport, holder.peer, pulled)
        pulled.assert_good(4)
        abandoned = asyncio.ensure_future(pull(transport, holder.peer, Pulled(chain(4))))
        await asyncio.sleep(0)
        await transport.close()
        with pytest.raises(PeerLost):
            await abandoned
    await eventually(lambda: holder.state()["open_leases"] == 0)
    assert reactor.num_pending == 0


async def test_garbage_and_old_versions_are_turned_away(reactor: UcxReactor, start_holder: StartHolder) -> None:
    holder = start_holder("--blocks", "1")
    port = int(holder.peer.pull_address.rpartition(":")[2])
    for frame in (b"\xff" * wire.FRAME_BYTES, wire.encode(wire.Hello(PROTOCOL_VERSION + 1, b"n" * 16))):
        endpoint = reactor.connect("127.0.0.1", port)
        await endpoint.stream_send(frame.ljust(wire.FRAME_BYTES, b"\0"))
        answer = bytearray(wire.FRAME_BYTES)
        try:
            async with asyncio.timeout(60):
                await asyncio.shield(endpoint.stream_recv(answer))
            assert isinstance(wire.decode(answer), wire.Refused)
        except PeerLost:
            pass
        endpoint.close()
    connection = await _connect(reactor, holder)
    failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
    connection.on_failed = failed.set_result
    connection.start()
    connection.send(wire.PushEnd(1, 1))
    async with asyncio.timeout(60):
        assert isinstance(await failed, PeerLost)
    good = UcxTransport(reactor, _KEY)
    pulled = Pulled(chain(1))
    await pull(good, holder.peer, pulled)
    pulled.assert_good(1)
    await good.close()


@pytest.mark.parametrize("order", ["forwards", "backwards", "mixed"])
async def test_blocks_arrive_whole_wherever_their_buffers_lie(
    reactor: UcxReactor, start_holder: StartHolder, order: str
) -> None:
    """Blocks that adjoin at both ends travel together; others do not."""
    holder = start_holder("--blocks", "40")
    pulled = Pulled(chain(40))
    if order == "backwards":
        pulled.buffers.reverse()
    elif order == "mixed":
        pulled.buffers[7:20] = pulled.buffers[19:6:-1]
    transport = UcxTransport(reactor, _KEY)
    await pull(transport, holder.peer, pulled)
    pulled.assert_good(40)
    await transport.close()


@pytest.mark.parametrize("groups", [[2], [1], [3], [0, 2], [-1, 3]])
async def test_groups_that_do_not_fit_the_buffers_are_refused(reactor: UcxReactor, groups: list[int]) -> None:
    """A holder that joins blocks whose buffers lie apart, or other blocks than it announced, writes nowhere."""
    accepted: asyncio.Future[UcxEndpoint] = asyncio.get_running_loop().create_future()
    port = reactor.listen(0, accepted.set_result)
    pulled = Pulled(chain(2))
    pulled.buffers.reverse()
    transport = UcxTransport(reactor, _KEY)
    peer = PeerAddress(f"127.0.0.1:{port}", "")
    pulling = asyncio.ensure_future(pull(transport, peer, pulled))
    connection = await UcxConnection.accept(await accepted, _KEY)
    asked: asyncio.Future[wire.AnyControl] = asyncio.get_running_loop().create_future()
    connection.on_message = asked.set_result
    connection.start()
    message = await asked
    assert isinstance(message, wire.Pull)
    assert message.runs == [1, 1]
    headers = [header(chain(2), i, payload(block_id, BLOCK_BYTES)) for i, block_id in enumerate(chain(2))]
    tag = connection.take_send_tags(2)
    connection.send(wire.Blocks(message.op, 0, tag, headers, ["ram", "ram"], "", groups))
    with pytest.raises(ProtocolViolation):
        await pulling
    assert pulled.headers == []
    assert bytes(pulled.memory) == bytes(len(pulled.memory))
    await transport.close()
    await eventually(lambda: connection.error is not None)


@pytest.mark.parametrize(("first", "count", "accepted"), [(-1, 2, 0), (2, -1, 0), (0, 3, 0), (0, 0, -1), (0, 0, 1)])
async def test_a_holder_that_accepts_what_was_not_offered(
    reactor: UcxReactor, first: int, count: int, accepted: int
) -> None:
    """Counts that cannot be are no result of a push, and move nothing."""
    accepting: asyncio.Future[UcxEndpoint] = asyncio.get_running_loop().create_future()
    port = reactor.listen(0, accepting.set_result)
    transport = UcxTransport(reactor, _KEY)
    data = memoryview(payload(chain(1)[0], BLOCK_BYTES))
    offer = PushRequest([header(chain(1), 0, bytes(data))] * 2, [data] * 2, EPOCH, 60.0)
    pushing = asyncio.ensure_future(transport.push(PeerAddress(f"127.0.0.1:{port}", ""), offer))
    connection = await UcxConnection.accept(await accepting, _KEY)
    asked: asyncio.Future[wire.AnyControl] = asyncio.get_running_loop().create_future()
    connection.on_message = asked.set_result
    connection.start()
    message = await asked
    assert isinstance(message, wire.Offer)
    connection.send(wire.Accept(message.op, first, count, connection.take_receive_tags(2)))
    connection.send(wire.PushEnd(message.op, accepted))
    async with asyncio.timeout(60):
        with pytest.raises(ProtocolViolation):
            await pushing
    await transport.close()
    await eventually(lambda: connection.error is not None)


def test_rdma_is_used_where_there_are_devices(tmp_path: Path) -> None:
    assert transports(tmp_path / "absent") == transports(tmp_path) == "tcp"
    (tmp_path / "mlx5_0").mkdir()
    assert transports(tmp_path).split(",")[0] == "rc"


def test_control_messages_are_bounded() -> None:
    with pytest.raises(ProtocolViolation):
        wire.encode(wire.Pull(1, bytes(wire.MAX_CONTROL_BYTES), 0, 1.0, "", ""))
    with pytest.raises(ProtocolViolation):
        wire.decode(b"\x05\x00\x00\x00hello")


async def test_a_port_is_free_again_at_once(reactor: UcxReactor) -> None:
    """The side that closes first keeps an address in TIME_WAIT for a minute: a killed node must get it back."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            listener.accept()[0].close()
            assert client.recv(1) == b""
    assert reactor.listen(port, lambda _: None) == port
