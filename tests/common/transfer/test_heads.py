"""Pulls of some KV heads of each block, over every transport, from a real holder process."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from services.common.security import MeshSecret
from services.common.transfer import wire
from services.common.transfer.errors import PeerLost, ProtocolViolation, TransferError
from services.common.transfer.header import verify_block
from services.common.transfer.heads import MAX_HEADS, HeadRange
from services.common.transfer.protocol import STOP_COMPLETE, STOP_HEADS, PullResult, Transport
from services.common.transfer.shm_directory import directory_supported
from tests.common.transfer.blocks import SECRET, block_format, chain, payload
from tests.common.transfer.conftest import HolderProcess, StartHolder, open_transport
from tests.common.transfer.test_transports import BLOCK_BYTES, Pulled, pull
from tests.support.waiting import eventually

_HEAD_BYTES = BLOCK_BYTES // 3
_TRIES = 4


async def test_only_the_wanted_heads_come(transport: Transport, start_holder: StartHolder) -> None:
    holder = start_holder()
    for heads in (HeadRange(0, 1), HeadRange(2, 1), HeadRange(1, 2), HeadRange(0, 3)):
        pulled = Pulled(chain(40), heads.count * _HEAD_BYTES)
        assert await pull(transport, holder.peer, pulled, heads=heads) == PullResult(40, STOP_COMPLETE)
        for header, buffer, block_id in zip(pulled.headers, pulled.buffers, pulled.ids, strict=True):
            verify_block(header, buffer, block_id, block_format(BLOCK_BYTES), heads)
            whole = payload(block_id, BLOCK_BYTES)
            assert buffer == whole[heads.first * _HEAD_BYTES : heads.end * _HEAD_BYTES]
    await eventually(lambda: holder.state()["open_leases"] == 0)


async def test_heads_of_listed_blocks_are_read_by_the_directory(
    transport: Transport, transport_name: str, start_holder: StartHolder
) -> None:
    """The rest, and what the listed blocks do not have, is asked for."""
    holder = start_holder("--blocks", "12", "--listed", "8")
    heads = HeadRange(1, 2)
    pulled = Pulled(chain(12), heads.count * _HEAD_BYTES)
    assert await pull(transport, holder.peer, pulled, heads=heads) == PullResult(12, STOP_COMPLETE)
    for header, buffer, block_id in zip(pulled.headers, pulled.buffers, pulled.ids, strict=True):
        verify_block(header, buffer, block_id, block_format(BLOCK_BYTES), heads)
        assert buffer == payload(block_id, BLOCK_BYTES)[_HEAD_BYTES:]
    reads = 8 if transport_name == "shm" and directory_supported() else 0
    await eventually(lambda: len(holder.state()["read"]) == reads)
    beyond = Pulled(chain(12), heads.count * _HEAD_BYTES)
    assert await pull(transport, holder.peer, beyond, heads=HeadRange(2, 2)) == PullResult(0, STOP_HEADS)


async def test_heads_that_a_block_does_not_have_are_a_short_answer(
    transport: Transport, start_holder: StartHolder
) -> None:
    holder = start_holder("--blocks", "4")
    for heads in (HeadRange(3, 1), HeadRange(2, 2), HeadRange(0, 4), HeadRange(MAX_HEADS - 1, 1)):
        pulled = Pulled(chain(4), _HEAD_BYTES)
        assert await pull(transport, holder.peer, pulled, heads=heads) == PullResult(0, STOP_HEADS)
        assert not any(pulled.memory)
    await _still_serves(transport, holder)


async def test_buffers_of_another_size_than_the_heads_are_never_filled_unnoticed(
    transport: Transport, start_holder: StartHolder
) -> None:
    """Whatever a transport makes of it, no block of it verifies."""
    holder = start_holder("--blocks", "4")
    wanted = HeadRange(0, 2)
    pulled = Pulled(chain(4), 3 * _HEAD_BYTES)
    try:
        await pull(transport, holder.peer, pulled, heads=wanted)
    except TransferError:
        assert not pulled.headers
    for header, buffer, block_id in zip(pulled.headers, pulled.buffers, pulled.ids, strict=False):
        with pytest.raises(TransferError, match="size"):
            verify_block(header, buffer, block_id, block_format(BLOCK_BYTES), wanted)
    await _still_serves(transport, holder)


async def test_a_wrong_bit_is_found_by_whoever_pulls_its_head(transport: Transport, start_holder: StartHolder) -> None:
    """The last byte, which is of the last head."""
    holder = start_holder("--blocks", "1", "--spoil", "0")
    for heads, reason in ((HeadRange(0, 2), ""), (HeadRange(1, 2), "checksum"), (HeadRange(2, 1), "checksum")):
        pulled = Pulled(chain(1), heads.count * _HEAD_BYTES)
        await pull(transport, holder.peer, pulled, heads=heads)
        arrived = pulled.headers[0], pulled.buffers[0], pulled.ids[0], block_format(BLOCK_BYTES), heads
        if reason:
            with pytest.raises(TransferError, match=reason):
                verify_block(*arrived)
        else:
            verify_block(*arrived)


async def test_absurd_heads_are_refused_and_the_holder_lives(transport_name: str, start_holder: StartHolder) -> None:
    holder = start_holder("--blocks", "2")
    for first, count in ((-1, 2), (0, 0), (0, -1), (MAX_HEADS, 1), (2**31, 2**31)):
        absurd = object.__new__(HeadRange)
        object.__setattr__(absurd, "first", first)
        object.__setattr__(absurd, "count", count)
        async with open_transport(transport_name, MeshSecret(SECRET)) as client:
            with pytest.raises((TransferError, ValueError)):
                await pull(client, holder.peer, Pulled(chain(2), _HEAD_BYTES), heads=absurd)
    async with open_transport(transport_name, MeshSecret(SECRET)) as client:
        await _still_serves(client, holder)


async def _pulled(transport: Transport, holder: HolderProcess, heads: HeadRange) -> Pulled:
    """The whole chain; a holder that gets no processor time counts as lost, and is asked again."""
    for _ in range(_TRIES):
        pulled = Pulled(chain(64), heads.count * _HEAD_BYTES)
        with contextlib.suppress(PeerLost):
            await pull(transport, holder.peer, pulled, deadline_s=120.0, heads=heads)
            return pulled
    raise AssertionError(f"lost {_TRIES} times")


async def test_pulls_of_different_heads_at_once(transport: Transport, start_holder: StartHolder) -> None:
    holder = start_holder()
    ranges = [HeadRange(first, count) for first in range(3) for count in range(1, 4 - first)] * 4
    pulls = await asyncio.gather(*(_pulled(transport, holder, heads) for heads in ranges))
    for pulled, heads in zip(pulls, ranges, strict=True):
        assert len(pulled.headers) == 64
        for header, buffer, block_id in zip(pulled.headers, pulled.buffers, pulled.ids, strict=True):
            verify_block(header, buffer, block_id, block_format(BLOCK_BYTES), heads)


def test_a_message_of_an_earlier_version_asks_for_whole_blocks() -> None:
    """Its last field was the request's id."""
    earlier = wire.encode(wire.Pull(7, b"i" * 32, 3, 1.5, "", "req-1"))
    body = bytearray(earlier)
    # The array's length is the first byte of the body; the last bytes are no runs, nil for the heads and a number.
    assert body[4] & 0xF0 == 0x90
    assert body[-11:] == b"\x90\xc0\xcb" + bytes(8)
    body[4] -= 3
    body[0] -= 11
    message = wire.decode(bytes(body[:-11]))
    assert isinstance(message, wire.Pull)
    assert message.heads is None
    assert message.request(1.0).ids == [b"i" * 16] * 2


@pytest.mark.parametrize("ids", [b"", b"i" * 15, b"i" * 16 * 5000])
def test_a_pull_of_no_or_of_too_many_blocks_is_refused(ids: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        wire.Pull(1, ids, 0, 1.0, "", "").request(1.0)


async def _still_serves(transport: Transport, holder: HolderProcess) -> None:
    pulled = Pulled(chain(2), _HEAD_BYTES)
    result = await pull(transport, holder.peer, pulled, heads=HeadRange(1, 1))
    assert result == PullResult(2, STOP_COMPLETE)
    for header, buffer, block_id in zip(pulled.headers, pulled.buffers, pulled.ids, strict=True):
        verify_block(header, buffer, block_id, block_format(BLOCK_BYTES), HeadRange(1, 1))
