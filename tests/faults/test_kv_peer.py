"""The serving process is stopped or killed in the middle of a pull or a push, over every transport."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from services.common.transfer.errors import TransferError
from services.common.transfer.protocol import PushResult, Transport
from tests.common.transfer.conftest import HolderProcess, StartHolder, start_holder, transport, transport_name
from tests.faults.transfers import (
    BLOCK_BYTES,
    DEADLINE_S,
    NUM_BLOCKS,
    LongPull,
    LongPush,
    Record,
    assert_in_time,
    recovery_s,
)
from tests.support.processes import free_port
from tests.support.waiting import eventually

__all__ = ["start_holder", "transport", "transport_name"]

pytestmark = pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
# The fault comes after so many blocks.
_AFTER = 8


class Peer:
    """A holder that can be ended and brought back at its addresses."""

    def __init__(self, start: StartHolder, *options: str) -> None:
        self._start = start
        self._options = (
            *("--grpc-port", str(free_port()), "--pull-port", str(free_port())),
            *("--block-bytes", str(BLOCK_BYTES), *options),
        )
        self.holder: HolderProcess = start(*self._options)

    def revive(self) -> float:
        """Wake it, or start it again; when it was there."""
        if self.holder.process.poll() is None:
            self.holder.signal(signal.SIGCONT)
        else:
            self.holder = self._start(*self._options)
        return time.monotonic()


async def test_in_mid_pull(
    transport: Transport,
    transport_name: str,
    start_holder: StartHolder,
    number: signal.Signals,
    record_property: Record,
) -> None:
    peer = Peer(start_holder, "--blocks", str(NUM_BLOCKS))
    pulled = LongPull(after=_AFTER, fault=lambda: peer.holder.signal(number))
    pulled.assert_cut_short(await pulled.run(transport, peer.holder.peer, DEADLINE_S))
    mark = pulled.mark_buffers()
    if number == signal.SIGKILL:
        await asyncio.to_thread(peer.holder.process.wait, 30)
    recovered_s = await recovery_s(transport, peer.holder.peer, peer.revive())
    await eventually(lambda: peer.holder.state()["open_leases"] == 0)
    assert pulled.memory == mark
    assert_in_time(
        record_property, f"pull, {transport_name}, {number.name}", pulled.timeline.longest_stall_s, recovered_s
    )


@pytest.mark.parametrize("transport_name", ["shm"])
async def test_in_mid_pull_by_directory(
    transport: Transport, start_holder: StartHolder, number: signal.Signals, record_property: Record
) -> None:
    """Half of the blocks are read without a word to the holder, the rest has to be asked for."""
    peer = Peer(start_holder, "--blocks", str(NUM_BLOCKS), "--listed", str(NUM_BLOCKS // 2))
    pulled = LongPull(after=_AFTER, fault=lambda: peer.holder.signal(number))
    pulled.assert_cut_short(await pulled.run(transport, peer.holder.peer, DEADLINE_S))
    mark = pulled.mark_buffers()
    if number == signal.SIGKILL:
        await asyncio.to_thread(peer.holder.process.wait, 30)
    recovered_s = await recovery_s(transport, peer.holder.peer, peer.revive())
    assert pulled.memory == mark
    assert_in_time(
        record_property, f"pull, shm by directory, {number.name}", pulled.timeline.longest_stall_s, recovered_s
    )


async def test_in_mid_push(
    transport: Transport,
    transport_name: str,
    start_holder: StartHolder,
    number: signal.Signals,
    record_property: Record,
) -> None:
    peer = Peer(start_holder, "--blocks", "4", "--commit-s", "0.4")
    push = LongPush(5)
    running = asyncio.ensure_future(push.run(transport, peer.holder.peer, DEADLINE_S))
    # Blocks have come, or are on their way, and are not kept yet.
    await eventually(lambda: _reservations(peer.holder) == 1)
    push.timeline.disturb(lambda: peer.holder.signal(number))
    end = await running
    assert isinstance(end, TransferError)
    if number == signal.SIGKILL:
        await asyncio.to_thread(peer.holder.process.wait, 30)
    recovered_s = await recovery_s(transport, peer.holder.peer, peer.revive())
    await eventually(lambda: peer.holder.state()["open_reservations"] == 0)
    push.assert_kept_exactly(peer.holder)
    again = await LongPush(5, count=2).run(transport, peer.holder.peer, DEADLINE_S)
    assert isinstance(again, PushResult)
    assert again.accepted == 2
    assert_in_time(
        record_property, f"push, {transport_name}, {number.name}", push.timeline.longest_stall_s, recovered_s
    )


def _reservations(holder: HolderProcess) -> int:
    return int(holder.state()["open_reservations"])
