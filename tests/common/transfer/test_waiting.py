"""Pulls of blocks that their holder is still computing, over every transport, between real processes."""

from __future__ import annotations

import asyncio
import time

import msgspec

from services.common.security import MeshSecret
from services.common.transfer import wire
from services.common.transfer.protocol import (
    STOP_COMPLETE,
    STOP_MISSING,
    PeerAddress,
    PullRequest,
    PullResult,
    Transport,
)
from tests.common.transfer.blocks import EPOCH, SECRET, chain
from tests.common.transfer.conftest import StartHolder, open_transport
from tests.common.transfer.test_transports import Pulled
from tests.support.waiting import eventually

NUM_BLOCKS = 40


async def pull(transport: Transport, peer: PeerAddress, pulled: Pulled, wait_s: float) -> PullResult:
    request = PullRequest(pulled.ids, EPOCH, 120.0, wait_s=wait_s)
    return await transport.pull(peer, request, pulled.buffers, pulled.on_block)


async def test_blocks_come_as_they_are_computed(transport: Transport, start_holder: StartHolder) -> None:
    holder = start_holder("--blocks", str(NUM_BLOCKS), "--computed", "0")
    pulled = Pulled(chain(NUM_BLOCKS))
    pulling = asyncio.create_task(pull(transport, holder.peer, pulled, 10.0))
    for computed in (1, 2, 11, 39, NUM_BLOCKS):
        await eventually(lambda: holder.state()["waiting"] == 1)
        assert holder.state()["open_leases"] == 0
        holder.state(f"compute {computed}")
        await eventually(lambda computed=computed: len(pulled.headers) == computed)
    assert (await pulling).num_blocks == NUM_BLOCKS
    assert pulling.result().stop == STOP_COMPLETE
    pulled.assert_good(NUM_BLOCKS)
    await eventually(lambda: holder.state()["open_leases"] == 0)


async def test_a_pull_ends_short_or_cancelled_and_the_holder_is_let_go(
    transport: Transport, start_holder: StartHolder
) -> None:
    holder = start_holder("--blocks", str(NUM_BLOCKS), "--computed", "7")
    short = Pulled(chain(NUM_BLOCKS))
    began_s = time.monotonic()
    result = await pull(transport, holder.peer, short, 0.4)
    assert (result.num_blocks, result.stop) == (7, STOP_MISSING)
    assert time.monotonic() - began_s >= 0.4
    short.assert_good(7)
    await eventually(lambda: (holder.state()["open_leases"], holder.state()["waiting"]) == (0, 0))
    cancelled = Pulled(chain(NUM_BLOCKS))
    pulling = asyncio.create_task(pull(transport, holder.peer, cancelled, 60.0))
    await eventually(lambda: len(cancelled.headers) == 7)
    await eventually(lambda: holder.state()["waiting"] == 1)
    pulling.cancel()
    await asyncio.wait([pulling], timeout=30.0)
    assert pulling.cancelled()
    await eventually(lambda: (holder.state()["open_leases"], holder.state()["waiting"]) == (0, 0))
    # The connection serves on.
    assert (await pull(transport, holder.peer, Pulled(chain(3)), 0.0)).num_blocks == 3


async def test_a_puller_that_goes_away_lets_the_holder_go(transport_name: str, start_holder: StartHolder) -> None:
    holder = start_holder("--blocks", str(NUM_BLOCKS), "--computed", "3")
    pulled = Pulled(chain(NUM_BLOCKS))
    async with open_transport(transport_name, MeshSecret(SECRET)) as client:
        pulling = asyncio.create_task(pull(client, holder.peer, pulled, 60.0))
        await eventually(lambda: len(pulled.headers) == 3)
        await eventually(lambda: holder.state()["waiting"] == 1)
        await client.close()
        await asyncio.wait([pulling], timeout=30.0)
        assert pulling.done()
        await asyncio.gather(pulling, return_exceptions=True)
    await eventually(lambda: (holder.state()["open_leases"], holder.state()["waiting"]) == (0, 0))


def test_a_pull_without_waiting_is_what_older_releases_say() -> None:
    ids = chain(3)
    message = wire.decode(wire.encode(wire.Pull.of(1, PullRequest(ids, EPOCH, 5.0, wait_s=2.0))))
    assert isinstance(message, wire.Pull)
    assert message.request(10.0).wait_s == 2.0
    # An older one leaves the last field out, and reads past one that it does not know.
    fields = msgspec.msgpack.decode(wire.encode(message)[4:])[:-1]
    body = msgspec.msgpack.encode(fields)
    older = wire.decode(len(body).to_bytes(4, "little") + body)
    assert isinstance(older, wire.Pull)
    assert older.request(10.0).wait_s == 0.0
