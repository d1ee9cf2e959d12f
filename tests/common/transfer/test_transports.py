"""What all transports promise, between real processes."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import time

import pytest

from services.common.blocks import BlockId
from services.common.security import MeshSecret
from services.common.transfer.errors import BlockInvalid, HandshakeRefused, PeerLost, TransferError, TransferTimeout
from services.common.transfer.header import verify_block
from services.common.transfer.heads import HeadRange
from services.common.transfer.protocol import (
    STOP_COMPLETE,
    STOP_DEADLINE,
    STOP_EPOCH,
    STOP_MISSING,
    PeerAddress,
    PullRequest,
    PullResult,
    PushRequest,
    Transport,
)
from services.common.transfer.shm_connection import NotHere
from tests.common.transfer.blocks import EPOCH, SECRET, block_format, chain, header, payload
from tests.common.transfer.conftest import HolderProcess, StartHolder, open_transport, shown
from tests.support.processor_time import idle_share
from tests.support.waiting import SOON_S, eventually

BLOCK_BYTES = 192 * 1024
MIB_BLOCK = 3 * 2**20


class Pulled:
    """Buffers in shared memory, as a worker's pool is, and what was reported into them."""

    def __init__(self, ids: list[BlockId], block_bytes: int = BLOCK_BYTES) -> None:
        self.ids = ids
        self.block_bytes = block_bytes
        self.memory = memoryview(mmap.mmap(-1, max(1, len(ids)) * block_bytes))
        self.buffers = [self.memory[i * block_bytes : (i + 1) * block_bytes] for i in range(len(ids))]
        self.headers: list[bytes] = []
        self.tiers: list[str] = []
        self.first = asyncio.Event()

    def on_block(self, index: int, encoded: bytes, tier: str) -> None:
        assert index == len(self.headers)
        self.headers.append(encoded)
        self.tiers.append(tier)
        self.first.set()

    def assert_good(self, count: int) -> None:
        assert len(self.headers) == count
        for index in range(count):
            verify_block(self.headers[index], self.buffers[index], self.ids[index], block_format(self.block_bytes))
            assert bytes(self.buffers[index]) == payload(self.ids[index], self.block_bytes)


async def pull(
    transport: Transport,
    peer: PeerAddress,
    pulled: Pulled,
    *,
    epoch: int = EPOCH,
    deadline_s: float = 30.0,
    traceparent: str = "",
    heads: HeadRange | None = None,
) -> PullResult:
    request = PullRequest(pulled.ids, epoch, deadline_s, traceparent, "req-1", heads)
    return await transport.pull(peer, request, pulled.buffers, pulled.on_block)


async def test_blocks_arrive_in_order_and_byte_exact(transport: Transport, start_holder: StartHolder) -> None:
    holder = start_holder()
    pulled = Pulled(chain(40))
    result = await pull(transport, holder.peer, pulled)
    assert result == PullResult(40, STOP_COMPLETE)
    pulled.assert_good(40)
    assert pulled.tiers == ["ram"] * 40
    await eventually(lambda: holder.state()["open_leases"] == 0)


async def test_an_answer_may_stop_short(transport: Transport, start_holder: StartHolder) -> None:
    holder = start_holder("--blocks", "5")
    pulled = Pulled(chain(9))
    assert await pull(transport, holder.peer, pulled) == PullResult(5, STOP_MISSING)
    pulled.assert_good(5)
    assert not any(pulled.memory[5 * BLOCK_BYTES :])
    none = Pulled(chain(3, chain_number=1))
    assert await pull(transport, holder.peer, none) == PullResult(0, STOP_MISSING)


async def test_another_epoch_gives_nothing(transport: Transport, start_holder: StartHolder) -> None:
    holder = start_holder("--blocks", "5")
    pulled = Pulled(chain(5))
    assert await pull(transport, holder.peer, pulled, epoch=EPOCH + 1) == PullResult(0, STOP_EPOCH)
    assert not any(pulled.memory)


async def test_trace_context_travels(transport: Transport, start_holder: StartHolder) -> None:
    holder = start_holder("--blocks", "1")
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await pull(transport, holder.peer, Pulled(chain(1)), traceparent=traceparent)
    assert [seen.split("-")[1] for seen in holder.state()["traceparents"]] == [traceparent.split("-")[1]]


async def test_a_wrong_secret_is_refused(transport_name: str, start_holder: StartHolder) -> None:
    holder = start_holder("--blocks", "1")
    other = MeshSecret("the secret of some other mesh")
    pulled = Pulled(chain(1))
    async with open_transport(transport_name, other) as stranger:
        # Over shared memory a stranger cannot even name the socket.
        with pytest.raises(NotHere if transport_name == "shm" else HandshakeRefused):
            await pull(stranger, holder.peer, pulled)
    assert not any(pulled.memory)


async def test_a_hundred_pulls_at_once(transport: Transport, start_holder: StartHolder) -> None:
    holder = start_holder()
    pulls = [Pulled(chain(64)[: 1 + number % 16]) for number in range(100)]
    results = await asyncio.gather(*(pull(transport, holder.peer, pulled, deadline_s=120.0) for pulled in pulls))
    for pulled, result in zip(pulls, results, strict=True):
        assert result == PullResult(len(pulled.ids), STOP_COMPLETE)
        pulled.assert_good(len(pulled.ids))
    await eventually(lambda: holder.state()["open_leases"] == 0)


async def test_push_and_pull_back(transport: Transport, start_holder: StartHolder) -> None:
    holder = start_holder("--blocks", "0")
    ids = chain(20, chain_number=3)
    data = [payload(block_id, BLOCK_BYTES) for block_id in ids]
    headers = [header(ids, i, block) for i, block in enumerate(data)]
    request = PushRequest(headers, shown(data), EPOCH, 60.0)
    result = await transport.push(holder.peer, request)
    assert (result.accepted, result.rejected) == (20, 0)
    assert holder.state()["pushed"] == [block_id.hex() for block_id in ids]
    assert holder.state()["open_reservations"] == 0


async def test_a_push_is_cut_at_the_first_bad_block(transport: Transport, start_holder: StartHolder) -> None:
    holder = start_holder("--blocks", "0")
    ids = chain(6, chain_number=3)
    data = [payload(block_id, BLOCK_BYTES) for block_id in ids]
    headers = [header(ids, i, block) for i, block in enumerate(data)]
    data[2] = bytes([data[2][0] ^ 1]) + data[2][1:]
    request = PushRequest(headers, shown(data), EPOCH, 60.0)
    result = await transport.push(holder.peer, request)
    assert (result.accepted, result.rejected) == (2, 4)


async def test_blocks_held_already_are_not_sent_again(transport: Transport, start_holder: StartHolder) -> None:
    holder = start_holder("--blocks", "3")
    ids = chain(5)
    data = [payload(block_id, BLOCK_BYTES) for block_id in ids]
    headers = [header(ids, i, block) for i, block in enumerate(data)]
    result = await transport.push(holder.peer, PushRequest(headers, shown(data), EPOCH, 60.0))
    assert result.accepted == 5
    assert holder.state()["pushed"] == [block_id.hex() for block_id in ids[3:]]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_peer_lost_in_mid_pull_is_an_error_within_a_second(
    transport: Transport, start_holder: StartHolder, number: signal.Signals
) -> None:
    holder = start_holder("--blocks", "48", "--block-bytes", str(MIB_BLOCK))
    pulled = Pulled(chain(48), MIB_BLOCK)
    task = asyncio.ensure_future(pull(transport, holder.peer, pulled, deadline_s=30.0))
    await pulled.first.wait()
    holder.signal(number)
    started_s = time.monotonic()
    with pytest.raises(PeerLost):
        await task
    assert time.monotonic() - started_s < SOON_S
    await _assert_untouched_from_now_on(holder, pulled)


async def _assert_untouched_from_now_on(holder: HolderProcess, pulled: Pulled) -> None:
    """After a pull has ended its buffers are somebody else's, whatever the peer does when it wakes up."""
    arrived = len(pulled.headers)
    pulled.assert_good(arrived)
    assert arrived < len(pulled.ids)
    mark = b"\xa5" * len(pulled.memory)
    pulled.memory[:] = mark
    if holder.process.poll() is None:
        holder.signal(signal.SIGCONT)
    deadline_s = time.monotonic() + 0.5
    while time.monotonic() < deadline_s:
        await asyncio.sleep(0.02)
    assert pulled.memory == mark


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_peer_lost_before_a_pull_or_push_is_an_error_within_a_second(
    transport: Transport, start_holder: StartHolder, number: signal.Signals
) -> None:
    holder = start_holder("--blocks", "2")
    await pull(transport, holder.peer, Pulled(chain(2)))
    holder.signal(number)
    for _ in range(2):
        started_s = time.monotonic()
        with pytest.raises(TransferError):
            await pull(transport, holder.peer, Pulled(chain(2)))
        assert time.monotonic() - started_s < SOON_S
    data = payload(chain(1)[0], BLOCK_BYTES)
    started_s = time.monotonic()
    with pytest.raises(TransferError):
        await transport.push(holder.peer, PushRequest([header(chain(1), 0, data)], shown([data]), EPOCH, 30.0))
    assert time.monotonic() - started_s < SOON_S


async def test_a_puller_reconnects(transport: Transport, start_holder: StartHolder) -> None:
    holder = start_holder("--blocks", "2", "--block-bytes", str(BLOCK_BYTES))
    await pull(transport, holder.peer, Pulled(chain(2)))
    holder.signal(signal.SIGSTOP)
    with pytest.raises(TransferError):
        await pull(transport, holder.peer, Pulled(chain(2)))
    holder.signal(signal.SIGCONT)
    pulled = Pulled(chain(2))
    await pull(transport, holder.peer, pulled)
    pulled.assert_good(2)


async def test_a_deadline_ends_a_pull_that_the_holder_does_not_answer(
    transport: Transport, start_holder: StartHolder
) -> None:
    holder = start_holder("--blocks", "1", "--hang")
    started_s = time.monotonic()
    try:
        assert (await pull(transport, holder.peer, Pulled(chain(1)), deadline_s=0.3)).stop == STOP_DEADLINE
    except TransferTimeout:
        assert time.monotonic() - started_s > 0.2
    assert time.monotonic() - started_s < SOON_S


async def test_a_cancelled_pull_leaves_the_connection_and_no_lease(
    transport: Transport, start_holder: StartHolder
) -> None:
    holder = start_holder("--blocks", "64", "--block-bytes", str(MIB_BLOCK))
    pulled = Pulled(chain(64), MIB_BLOCK)
    task = asyncio.ensure_future(pull(transport, holder.peer, pulled))
    await pulled.first.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    mark = b"\xa5" * len(pulled.memory)
    pulled.memory[:] = mark
    await eventually(lambda: holder.state()["open_leases"] == 0)
    assert pulled.memory == mark
    again = Pulled(chain(2), MIB_BLOCK)
    await pull(transport, holder.peer, again)
    again.assert_good(2)


async def test_a_lost_puller_costs_the_holder_no_lease(transport_name: str, start_holder: StartHolder) -> None:
    """The puller dies: another holder process plays it, killed by closing its connection in mid-pull."""
    holder = start_holder("--blocks", "48", "--block-bytes", str(MIB_BLOCK))
    async with open_transport(transport_name, MeshSecret(SECRET)) as puller:
        pulled = Pulled(chain(48), MIB_BLOCK)
        task = asyncio.ensure_future(pull(puller, holder.peer, pulled))
        await pulled.first.wait()
        await puller.close()
        with pytest.raises((TransferError, asyncio.CancelledError)):
            await task
        await eventually(lambda: holder.state()["open_leases"] == 0)


async def test_nobody_listens(transport: Transport) -> None:
    started_s = time.monotonic()
    with pytest.raises(TransferError):
        await pull(transport, PeerAddress("127.0.0.1:9", "127.0.0.1:9"), Pulled(chain(1)))
    assert time.monotonic() - started_s < SOON_S


async def test_a_block_of_another_model_is_not_verified(transport: Transport, start_holder: StartHolder) -> None:
    holder = start_holder("--blocks", "1")
    pulled = Pulled(chain(1))
    await pull(transport, holder.peer, pulled)
    expected = block_format(BLOCK_BYTES)
    other = type(expected)(b"x" * 16, expected.kv_dtype, 3, BLOCK_BYTES, expected.segments)
    with pytest.raises(BlockInvalid, match="model"):
        verify_block(pulled.headers[0], pulled.buffers[0], pulled.ids[0], other)


async def test_idle_processes_use_no_cpu(transport: Transport, start_holder: StartHolder) -> None:
    """With the connection open, once the busy time after a pull is over: under 2 % of a core on both sides."""
    holder = start_holder("--blocks", "4")
    await pull(transport, holder.peer, Pulled(chain(4)))
    assert await idle_share(os.getpid(), holder.pid, below=0.02) < 0.02
