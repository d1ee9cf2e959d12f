"""The network fails in the middle of a pull or a push: cut in both directions or one, reset, unplugged, slow."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from services.common.transfer.errors import PeerLost, TransferError
from services.common.transfer.protocol import PushResult, Transport
from tests.common.transfer.conftest import HolderProcess, transport
from tests.faults.transfers import (
    BLOCK_BYTES,
    DEADLINE_S,
    NUM_BLOCKS,
    PUSH_BLOCKS,
    RECOVERY_LIMIT_S,
    STALL_LIMIT_S,
    LongPull,
    LongPush,
    Record,
    assert_in_time,
    recovery_s,
    report,
)
from tests.support.netns import Island
from tests.support.waiting import eventually

__all__ = ["transport"]

_AFTER = 8
_LONG_OUTAGE_S = 3.5
# A message of blocks takes half a second.
_SLOW_MBIT = 40
_SLOW_DEADLINE_S = 2.0
_FAULTS: dict[str, Callable[[Island], None]] = {
    "cut": Island.drop,
    "deaf": Island.drop_incoming,
    "mute": Island.drop_outgoing,
    "reset": Island.reset,
    "unplugged": Island.unplug,
    "crawl": Island.crawl,
}
# For a push the others are a cut.
_PUSH_FAULTS = ("cut", "deaf", "mute", "reset")
over_every_fault = pytest.mark.parametrize("fault", _FAULTS.values(), ids=_FAULTS.keys())


@pytest.fixture(scope="module", params=["ucx", "grpc"])
def transport_name(request: pytest.FixtureRequest) -> str:
    """Shared memory has no network that could fail."""
    return str(request.param)


@pytest.fixture(scope="module")
def holder(transport_name: str, link: Island) -> Iterator[HolderProcess]:
    """Behind the link; it is not started again in this module."""
    sizes = ("--blocks", str(NUM_BLOCKS), "--block-bytes", str(BLOCK_BYTES))
    started = HolderProcess(transport_name, "--host", link.address, *sizes, within=link.within)
    yield started
    started.end()


@contextmanager
def mended(link: Island) -> Iterator[None]:
    """The link is whole afterwards, whatever the test did."""
    try:
        yield
    finally:
        link.mend()


@over_every_fault
async def test_in_mid_pull(
    fault: Callable[[Island], None],
    transport: Transport,
    transport_name: str,
    holder: HolderProcess,
    link: Island,
    record_property: Record,
) -> None:
    with mended(link):
        pulled = LongPull(after=_AFTER, fault=lambda: fault(link))
        pulled.assert_cut_short(await pulled.run(transport, holder.peer, DEADLINE_S))
        mark = pulled.mark_buffers()
    recovered_s = await recovery_s(transport, holder.peer, time.monotonic())
    await eventually(lambda: holder.state()["open_leases"] == 0)
    assert pulled.memory == mark
    assert_in_time(
        record_property, f"pull, {transport_name}, {fault.__name__}", pulled.timeline.longest_stall_s, recovered_s
    )


@pytest.mark.parametrize("fault", [_FAULTS[name] for name in _PUSH_FAULTS], ids=_PUSH_FAULTS)
async def test_in_mid_push(
    fault: Callable[[Island], None],
    transport: Transport,
    transport_name: str,
    holder: HolderProcess,
    link: Island,
    record_property: Record,
) -> None:
    number = 10 + list(_FAULTS.values()).index(fault)
    push = LongPush(number)
    before = link.sent_bytes
    with mended(link):
        running = asyncio.ensure_future(push.run(transport, holder.peer, DEADLINE_S))
        await eventually(lambda: link.sent_bytes - before > _AFTER * BLOCK_BYTES)
        assert not running.done()
        push.timeline.disturb(lambda: fault(link))
        end = await running
    stall_s = push.timeline.longest_stall_s
    assert isinstance(end, TransferError)
    assert link.sent_bytes - before < PUSH_BLOCKS * BLOCK_BYTES
    recovered_s = await recovery_s(transport, holder.peer, time.monotonic())
    await eventually(lambda: holder.state()["open_reservations"] == 0)
    assert push.assert_kept_exactly(holder) < PUSH_BLOCKS
    again = await push.run(transport, holder.peer, DEADLINE_S)
    assert isinstance(again, PushResult)
    assert again.accepted == push.assert_kept_exactly(holder) == PUSH_BLOCKS
    assert_in_time(record_property, f"push, {transport_name}, {fault.__name__}", stall_s, recovered_s)


async def test_a_slow_link_ends_a_pull_at_its_deadline(
    transport: Transport, transport_name: str, holder: HolderProcess, link: Island, record_property: Record
) -> None:
    """Blocks come, so nobody is lost; what came is used, and the same connection serves the next pull."""
    with mended(link):
        pulled = LongPull(after=_AFTER, fault=lambda: link.limit(_SLOW_MBIT))
        started_s = time.monotonic()
        end = await pulled.run(transport, holder.peer, _SLOW_DEADLINE_S)
        late_s = time.monotonic() - started_s - _SLOW_DEADLINE_S
    pulled.assert_cut_short(end)
    assert not isinstance(end, PeerLost)
    assert len(pulled.headers) > _AFTER
    recovered_s = await recovery_s(transport, holder.peer, time.monotonic())
    await eventually(lambda: holder.state()["open_leases"] == 0)
    report(record_property, f"pull, {transport_name}, slow", late_s=late_s, recovered_s=recovered_s)
    assert late_s < STALL_LIMIT_S
    assert recovered_s < RECOVERY_LIMIT_S


async def test_a_long_outage_costs_each_pull_a_second_and_ends_at_once(
    transport: Transport, transport_name: str, holder: HolderProcess, link: Island, record_property: Record
) -> None:
    """TCP's own timeouts have grown to seconds when the link is back."""
    with mended(link):
        pulled = LongPull(after=_AFTER, fault=link.drop)
        pulled.assert_cut_short(await pulled.run(transport, holder.peer, DEADLINE_S))
        began_s, stalls_s = time.monotonic(), [pulled.timeline.longest_stall_s]
        while time.monotonic() - began_s < _LONG_OUTAGE_S:
            started_s = time.monotonic()
            assert isinstance(await LongPull(1).run(transport, holder.peer, DEADLINE_S), TransferError)
            stalls_s.append(time.monotonic() - started_s)
    recovered_s = await recovery_s(transport, holder.peer, time.monotonic())
    assert_in_time(record_property, f"outage, {transport_name}", max(stalls_s), recovered_s)


async def test_a_peer_killed_behind_the_link(
    transport: Transport, transport_name: str, link: Island, record_property: Record
) -> None:
    """It is killed while it is cut off, so nothing tells of its end; another one comes up at its address."""
    options = ("--host", link.address, "--grpc-port", "7001", "--pull-port", "7002", "--blocks", str(NUM_BLOCKS))
    sizes = ("--block-bytes", str(BLOCK_BYTES))
    first = HolderProcess(transport_name, *options, *sizes, within=link.within)
    second: HolderProcess | None = None
    try:
        with mended(link):

            def cut_and_kill() -> None:
                link.drop()
                first.signal(signal.SIGKILL)

            pulled = LongPull(after=_AFTER, fault=cut_and_kill)
            pulled.assert_cut_short(await pulled.run(transport, first.peer, DEADLINE_S))
            await asyncio.to_thread(first.process.wait, 30)
            second = HolderProcess(transport_name, *options, *sizes, within=link.within)
        recovered_s = await recovery_s(transport, second.peer, time.monotonic())
    finally:
        first.end()
        if second is not None:
            second.end()
    assert_in_time(record_property, f"cut and killed, {transport_name}", pulled.timeline.longest_stall_s, recovered_s)
