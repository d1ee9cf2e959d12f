"""What only shared memory can get wrong: leases that end under a reader, memory that could vanish, places that lie."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import mmap
import os
import signal
import time
from pathlib import Path

import pytest

from services.common.blocks import join_ids
from services.common.security import MeshSecret
from services.common.transfer import wire
from services.common.transfer.errors import PeerLost, ProtocolViolation, TransferError, TransferTimeout
from services.common.transfer.protocol import STOP_COMPLETE, PeerAddress, PullRequest, PushRequest
from services.common.transfer.shm_client import ShmTransport
from services.common.transfer.shm_connection import NotShown, ShmConnection, listen
from services.common.transfer.shm_regions import adopt_region, create_region, map_received
from tests.common.transfer.blocks import EPOCH, SECRET, chain, header, payload
from tests.common.transfer.conftest import StartHolder, shown_memory
from tests.common.transfer.test_transports import BLOCK_BYTES, Pulled, pull
from tests.support.waiting import SOON_S, eventually

_KEY = MeshSecret(SECRET).pull_key


@pytest.fixture
def transport_name() -> str:
    return "shm"


async def test_a_block_copied_after_the_lease_is_not_reported(start_holder: StartHolder) -> None:
    """The puller sleeps over the end of the lease, as a stopped process would."""
    holder = start_holder("--blocks", "8")
    transport = ShmTransport(_KEY, [])
    pulled = Pulled(chain(8))
    reported = 0

    def on_block(index: int, encoded: bytes, tier: str) -> None:
        nonlocal reported
        reported += 1
        if index == 2:
            time.sleep(0.5)

    with pytest.raises(TransferTimeout):
        await transport.pull(holder.peer, PullRequest(pulled.ids, EPOCH, 0.4), pulled.buffers, on_block)
    assert reported == 3
    await eventually(lambda: holder.state()["open_leases"] == 0)
    await pull(transport, holder.peer, pulled)
    pulled.assert_good(8)
    await transport.close()


async def test_a_puller_that_takes_nothing_loses_its_lease_at_the_deadline(start_holder: StartHolder) -> None:
    holder = start_holder("--blocks", "4")
    connection = await ShmConnection.connect(holder.peer.grpc_address, _KEY, [])
    connection.start()
    connection.begin()
    connection.send(wire.Pull(1, join_ids(chain(4)), EPOCH, 0.5, "", ""))
    await eventually(lambda: holder.state()["open_leases"] == 1)
    started_s = time.monotonic()
    await eventually(lambda: holder.state()["open_leases"] == 0)
    assert time.monotonic() - started_s < SOON_S
    connection.fail(PeerLost("end of the test"))


async def test_a_silent_puller_holds_blocks_for_a_second_at_most(start_holder: StartHolder) -> None:
    """It neither takes blocks nor answers heartbeats."""
    holder = start_holder("--blocks", "4")
    connection = await ShmConnection.connect(holder.peer.grpc_address, _KEY, [])
    connection.send(wire.Pull(1, join_ids(chain(4)), EPOCH, 30.0, "", ""))
    await eventually(lambda: holder.state()["open_leases"] == 1)
    started_s = time.monotonic()
    await eventually(lambda: holder.state()["open_leases"] == 0)
    assert time.monotonic() - started_s < SOON_S
    connection.fail(PeerLost("end of the test"))


async def test_messages_from_a_client_are_checked(start_holder: StartHolder) -> None:
    holder = start_holder("--blocks", "2")
    for message in (
        wire.Taken(1, 3),
        wire.PushEnd(1, 1),
        wire.ShownOffer(1, [header(chain(1), 0, payload(chain(1)[0], BLOCK_BYTES))], [], EPOCH, 1.0, ""),
    ):
        connection = await ShmConnection.connect(holder.peer.grpc_address, _KEY, [])
        failed: asyncio.Future[TransferError] = asyncio.get_running_loop().create_future()
        connection.on_failed = failed.set_result
        connection.start()
        connection.send(wire.Pull(1, join_ids(chain(2)), EPOCH, 120.0, "", ""))
        await eventually(lambda: holder.state()["open_leases"] == 1)
        connection.send(message)
        if isinstance(message, wire.ShownOffer):
            await eventually(lambda: holder.state()["open_reservations"] == 0)
            connection.fail(PeerLost("end of the test"))
        async with asyncio.timeout(60):
            assert isinstance(await failed, PeerLost)
        await eventually(lambda: holder.state()["open_leases"] == 0)


async def test_a_place_outside_the_shown_memory_is_refused(start_holder: StartHolder) -> None:
    """A pusher that names memory which it does not show costs itself the push, and the holder nothing."""
    holder = start_holder("--blocks", "0")
    data = payload(chain(1)[0], BLOCK_BYTES)
    size = len(shown_memory().view)
    for place in ((1, 0, BLOCK_BYTES), (0, size - 10, BLOCK_BYTES), (0, -1, BLOCK_BYTES), (0, 0, BLOCK_BYTES - 1)):
        connection = await ShmConnection.connect(holder.peer.grpc_address, _KEY, [shown_memory()])
        connection.start()
        connection.send(wire.ShownOffer(1, [header(chain(1), 0, data)], [place], EPOCH, 120.0, ""))
        await eventually(lambda: holder.state()["open_reservations"] == 0)
        connection.fail(PeerLost("end of the test"))
    assert holder.state()["pushed"] == []
    transport = ShmTransport(_KEY, [shown_memory()])
    with pytest.raises(NotShown):
        await transport.push(holder.peer, PushRequest([header(chain(1), 0, data)], [memoryview(data)], EPOCH, 120.0))
    await transport.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_holder_lost_while_it_leases_is_an_error_within_a_second(
    start_holder: StartHolder, number: signal.Signals
) -> None:
    holder = start_holder("--blocks", "1", "--hang")
    transport = ShmTransport(_KEY, [])
    task = asyncio.ensure_future(pull(transport, holder.peer, Pulled(chain(1)), deadline_s=30.0))
    await eventually(lambda: len(holder.state()["traceparents"]) == 1)
    holder.signal(number)
    started_s = time.monotonic()
    with pytest.raises(PeerLost):
        await task
    assert time.monotonic() - started_s < SOON_S
    await transport.close()


def test_regions_cannot_shrink_or_be_written_by_others() -> None:
    region = create_region("kvmesh-test", 8192)
    assert region is not None
    region.view[:4] = b"abcd"
    seen = map_received(os.dup(region.descriptor))
    assert seen.readonly
    assert bytes(seen[:4]) == b"abcd"
    region.view[:4] = b"efgh"
    assert bytes(seen[:4]) == b"efgh"
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(region.descriptor, 0)
    with pytest.raises(OSError, match="not permitted"):
        mmap.mmap(region.descriptor, 8192)
    with pytest.raises(OSError, match="not permitted"):
        os.write(region.descriptor, b"x")


def test_memory_that_could_shrink_is_not_mapped() -> None:
    descriptor = os.memfd_create("kvmesh-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    with pytest.raises(ProtocolViolation):
        map_received(descriptor)
    with pytest.raises(OSError, match="Bad file"):
        fcntl.fcntl(descriptor, fcntl.F_GETFD)
    plain = os.memfd_create("kvmesh-test", os.MFD_CLOEXEC)
    os.ftruncate(plain, 4096)
    assert adopt_region(plain, memoryview(mmap.mmap(plain, 4096))) is None
    os.close(plain)


async def test_an_impostor_at_the_socket_is_refused() -> None:
    """Whoever takes the name without the secret learns nothing and shows nothing."""
    address = "127.0.0.1:65001"
    impostor = listen(_KEY, address)
    transport = ShmTransport(_KEY, [shown_memory()])
    pulling = asyncio.ensure_future(pull(transport, PeerAddress("", address), Pulled(chain(1))))
    loop = asyncio.get_running_loop()
    endpoint, _ = await loop.sock_accept(impostor)
    endpoint.setblocking(False)
    assert isinstance(wire.decode(await loop.sock_recv(endpoint, 4096)), wire.Hello)
    endpoint.send(wire.encode(wire.Challenge(1, b"n" * wire.NONCE_BYTES, b"p" * 32)))
    with pytest.raises(TransferError):
        await pulling
    rest = await loop.sock_recv(endpoint, 4096)
    assert rest == b""
    endpoint.close()
    impostor.close()
    await transport.close()


async def test_nothing_is_left_of_connections(start_holder: StartHolder) -> None:
    """Mappings and descriptors go with the connection."""
    holder = start_holder("--blocks", "2")

    async def once() -> None:
        transport = ShmTransport(_KEY, [shown_memory()])
        assert (await pull(transport, holder.peer, Pulled(chain(2)))).stop == STOP_COMPLETE
        await transport.close()

    await once()
    before = len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{holder.pid}/fd"))
    for _ in range(10):
        await once()
    await eventually(lambda: len(os.listdir(f"/proc/{holder.pid}/fd")) <= before[1])
    assert len(os.listdir("/proc/self/fd")) <= before[0]
    await eventually(lambda: "kvmesh-test" not in Path(f"/proc/{holder.pid}/maps").read_text())


def test_control_messages_can_share_a_packet() -> None:
    packet = wire.encode(wire.Ping()) + wire.encode(wire.Taken(3, 4))
    assert [wire.decode(part) for part in wire.split(memoryview(packet))] == [wire.Ping(), wire.Taken(3, 4)]
    with pytest.raises(ProtocolViolation):
        list(wire.split(memoryview(packet + b"x")))


def test_a_region_that_is_gone_keeps_no_descriptor() -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    regions = [create_region("kvmesh-test", 4096) for _ in range(8)]
    assert descriptors() > before
    regions.clear()
    assert descriptors() <= before
