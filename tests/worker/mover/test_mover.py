"""The mover as its engine and its front see it, with real holders and real peers."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time

import pytest

from services.common.blocks import BlockId
from services.common.transfer.protocol import STOP_EPOCH, PeerAddress, PullResult, Transport
from services.worker.messages import HolderRun
from services.worker.mover_messages import CancelPull, NodeFailing, PullDone, PushDone
from tests.common.transfer.blocks import EPOCH, chain, payload
from tests.common.transfer.conftest import StartHolder, start_holder, transport, transport_name
from tests.common.transfer.test_transports import Pulled, pull
from tests.kvstore.conftest import StartKvStore, start_kvstore
from tests.support.processor_time import idle_share
from tests.support.waiting import PATIENCE_S, SOON_S, eventually
from tests.worker.mover.conftest import BLOCK_BYTES, MoverProcess, StartMover

__all__ = ["start_holder", "start_kvstore", "transport", "transport_name"]

_ROOT_ID = BlockId(b"r" * 16)


def run_at(
    peer: PeerAddress, first: int, count: int, *, kind: str = "kvstore", epoch: int = EPOCH, name: str = "holder"
) -> HolderRun:
    return HolderRun(kind, name, epoch, peer.pull_address, peer.grpc_address, first, count)


def assert_slots(mover: MoverProcess, ids: list[BlockId], slots: list[int]) -> None:
    for block_id, slot in zip(ids, slots, strict=True):
        assert bytes(mover.slot(slot)) == payload(block_id, BLOCK_BYTES)


async def test_it_pulls_into_the_engines_slots(
    transport_name: str, start_mover: StartMover, start_holder: StartHolder
) -> None:
    mover, holder = await start_mover(transport_name), start_holder()
    assert mover.ready.transport == transport_name
    model = ["--blocks", "12"]
    other = start_holder(*model)
    ids, slots = chain(20), list(range(40, 60))
    mover.pull(1, ids, slots, run_at(other.peer, 0, 8), run_at(holder.peer, 8, 12))
    done = await mover.done(PullDone, 1)
    assert (done.num_blocks, done.tiers, done.error) == (20, ["ram"] * 20, "")
    assert [(timing.num_blocks, timing.outcome) for timing in done.runs] == [(8, "ok"), (12, "ok")]
    assert all(0 < timing.first_block_s <= timing.seconds for timing in done.runs)
    assert_slots(mover, ids, slots)
    await eventually(lambda: mover.counters is not None and mover.counters.pulled_blocks == 20)


async def test_what_does_not_come_is_reported_and_untouched(
    transport_name: str, start_mover: StartMover, start_holder: StartHolder
) -> None:
    mover, holder = await start_mover(transport_name), start_holder("--blocks", "5")
    ids = chain(8)
    mover.pull(1, ids, list(range(8)), run_at(holder.peer, 0, 8))
    short = await mover.done(PullDone, 1)
    assert (short.num_blocks, short.error) == (5, "missing")
    assert not any(mover.pool[5 * BLOCK_BYTES : 8 * BLOCK_BYTES])
    mover.pull(2, ids, list(range(8)), run_at(holder.peer, 0, 8, epoch=3))
    assert (await mover.done(PullDone, 2)).error == STOP_EPOCH
    mover.pull(3, ids, list(range(8)), run_at(PeerAddress("127.0.0.1:9", "127.0.0.1:9"), 0, 8))
    assert (await mover.done(PullDone, 3)).num_blocks == 0
    mover.pull(4, ids, list(range(8)), run_at(holder.peer, 1, 4))
    assert "gap" in (await mover.done(PullDone, 4)).error
    mover.pull(5, ids, [*range(7), 5000], run_at(holder.peer, 0, 5))
    assert (await mover.done(PullDone, 5)).num_blocks == 0
    # A holder that calls itself a worker may not say "ram".
    mover.pull(6, ids, list(range(8)), run_at(holder.peer, 0, 5, kind="worker"))
    assert (await mover.done(PullDone, 6)).error == "invalid tier"
    await eventually(lambda: mover.counters is not None and mover.counters.verification_failures == 1)


async def test_a_flipped_bit_ends_a_pull_before_the_block(
    transport_name: str, start_mover: StartMover, start_holder: StartHolder
) -> None:
    mover, holder = await start_mover(transport_name), start_holder("--spoil", "7")
    mover.pull(1, chain(20), list(range(20)), run_at(holder.peer, 0, 20))
    done = await mover.done(PullDone, 1)
    assert (done.num_blocks, done.tiers, done.error) == (7, ["ram"] * 7, "invalid checksum")
    await eventually(lambda: mover.counters is not None and mover.counters.verification_failures == 1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_lost_holder_ends_a_pull_within_a_second(
    transport_name: str, start_mover: StartMover, start_holder: StartHolder, number: signal.Signals
) -> None:
    mover, holder = await start_mover(transport_name), start_holder()
    mover.pull(1, chain(2), [0, 1], run_at(holder.peer, 0, 2))
    await mover.done(PullDone, 1)
    holder.signal(number)
    started_s = time.monotonic()
    mover.pull(2, chain(64)[:40], list(range(40)), run_at(holder.peer, 0, 40))
    done = await mover.done(PullDone, 2)
    assert time.monotonic() - started_s < SOON_S
    assert (done.num_blocks, done.error != "") == (0, True)
    mark = b"\xa5" * len(mover.pool)
    mover.pool[:] = mark
    if number == signal.SIGSTOP:
        holder.signal(signal.SIGCONT)
        deadline_s = time.monotonic() + 0.4
        while time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
    assert mover.pool == mark


async def test_every_pull_has_one_end_also_when_cancelled(
    transport_name: str, start_mover: StartMover, start_holder: StartHolder
) -> None:
    mover, holder = await start_mover(transport_name), start_holder("--hang", "--blocks", "1")
    for key in range(1, 21):
        mover.pull(key, chain(1), [key], run_at(holder.peer, 0, 1))
        mover.engine.send(CancelPull(key))
    for key in range(1, 21):
        assert (await mover.done(PullDone, key)).error == "cancelled"
    mover.pull(30, chain(1), [30], run_at(holder.peer, 0, 1), deadline_s=0.2)
    assert (await mover.done(PullDone, 30)).num_blocks == 0
    mover.engine.send(CancelPull(12345))
    assert len([m for m in mover.messages if isinstance(m, PullDone)]) == 21


async def test_it_serves_pinned_blocks(transport_name: str, transport: Transport, start_mover: StartMover) -> None:
    mover = await start_mover(transport_name)
    ids = chain(30)
    mover.fill(ids[:25])
    pulled = Pulled(ids)
    assert await pull(transport, mover.peer, pulled) == PullResult(25, "missing")
    pulled.assert_good(25)
    assert set(pulled.tiers) == {"peer"}
    await eventually(lambda: not mover.pins)
    assert (await pull(transport, mover.peer, Pulled(ids), epoch=EPOCH + 1)).stop == STOP_EPOCH
    mover.answers_pins = False
    started_s = time.monotonic()
    result = await pull(transport, mover.peer, Pulled(ids), deadline_s=60.0)
    assert result.num_blocks == 0
    assert time.monotonic() - started_s < SOON_S
    await eventually(lambda: mover.counters is not None and mover.counters.served_blocks == 25)


async def test_two_movers_exchange_blocks(transport_name: str, start_mover: StartMover) -> None:
    source, target = await start_mover(transport_name), await start_mover(transport_name)
    ids = chain(24)
    source.fill(ids)
    target.pull(1, ids, list(range(10, 34)), run_at(source.peer, 0, 24, kind="worker"))
    done = await target.done(PullDone, 1)
    assert (done.num_blocks, set(done.tiers)) == (24, {"peer"})
    assert_slots(target, ids, list(range(10, 34)))
    await eventually(lambda: not source.pins)


async def test_a_pushed_prefix_comes_back(
    transport_name: str, start_mover: StartMover, start_kvstore: StartKvStore
) -> None:
    mover, node = await start_mover(transport_name), start_kvstore(transport_name)
    ids = chain(20)
    parents = [_ROOT_ID, *ids[:-1]]
    slots = mover.fill(ids)
    mover.push(1, ids[:2], parents[:2], slots[:2], starts=True)
    assert (await mover.done(PushDone, 1)).accepted == 0
    mover.target("kv-1", node.peer)
    mover.push(2, ids[10:], parents[10:], slots[10:], starts=False)
    assert (await mover.done(PushDone, 2)).accepted == 0
    mover.push(3, ids[:10], parents[:10], slots[:10], starts=True)
    assert (await mover.done(PushDone, 3)).accepted == 10
    mover.push(4, ids[10:], parents[10:], slots[10:], starts=False)
    assert (await mover.done(PushDone, 4)).accepted == 10
    mover.pool[:] = bytes(len(mover.pool))
    mover.pull(5, ids, list(range(30, 50)), run_at(node.peer, 0, 20, epoch=0))
    done = await mover.done(PullDone, 5)
    assert (done.num_blocks, done.tiers) == (20, ["ram"] * 20)
    assert_slots(mover, ids, list(range(30, 50)))
    node.end()
    mover.push(6, ids, parents, slots, starts=True)
    assert (await mover.done(PushDone, 6)).accepted == 0
    await eventually(lambda: mover.counters is not None and mover.counters.dropped_pushes >= 32)


async def test_a_chain_pushed_in_pieces_arrives_whole(
    transport_name: str, start_mover: StartMover, start_kvstore: StartKvStore
) -> None:
    """Pieces are offered beside each other, but none before its parent, of whatever size they are."""
    mover, node = await start_mover(transport_name), start_kvstore(transport_name)
    ids = chain(60)
    parents = [_ROOT_ID, *ids[:-1]]
    slots = mover.fill(ids)
    mover.target("kv-1", node.peer)
    mover.push(1, ids[:1], parents[:1], slots[:1], starts=True)
    await mover.done(PushDone, 1)
    pieces = [*range(1, 20), *range(20, 60, 8)]
    for key, (first, end) in enumerate(itertools.pairwise([*pieces, 60]), 2):
        mover.push(key, ids[first:end], parents[first:end], slots[first:end], starts=False)
    for key, (first, end) in enumerate(itertools.pairwise([*pieces, 60]), 2):
        assert await mover.done(PushDone, key) == PushDone(key, end - first, "kv-1", 0, False)


async def test_it_ends_with_its_links(transport_name: str, start_mover: StartMover) -> None:
    mover = await start_mover(transport_name)
    mover.process.send_signal(signal.SIGTERM)
    await mover.engine.close()
    assert await asyncio.to_thread(mover.process.wait, 30) == 0


async def test_an_idle_mover_uses_no_cpu(transport_name: str, start_mover: StartMover) -> None:
    mover = await start_mover(transport_name)
    assert await idle_share(mover.process.pid, below=0.021) < 0.021


async def test_pulled_bytes_are_counted_by_transport(
    transport_name: str, start_mover: StartMover, start_holder: StartHolder
) -> None:
    mover, holder = await start_mover(transport_name), start_holder("--blocks", "3")
    mover.pull(1, chain(3), [0, 1, 2], run_at(holder.peer, 0, 3))
    await mover.done(PullDone, 1)
    expected = {transport_name: 3 * BLOCK_BYTES}
    await eventually(lambda: mover.counters is not None and mover.counters.bytes_by_transport == expected)


async def test_a_dead_node_is_reported_and_costs_no_waits(
    transport_name: str, start_mover: StartMover, start_kvstore: StartKvStore
) -> None:
    mover, node = await start_mover(transport_name), start_kvstore(transport_name)
    ids = chain(2)
    slots = mover.fill(ids)
    mover.target("kv-1", node.peer)
    mover.push(1, ids, [_ROOT_ID, ids[0]], slots, starts=True)
    assert (await mover.done(PushDone, 1)) == PushDone(1, 2, "kv-1", 0, False)
    node.end()
    for key in (2, 3, 4):
        mover.pull(key, ids, [10, 11], run_at(node.peer, 0, 2, epoch=0, name="kv-1"))
        assert (await mover.done(PullDone, key)).num_blocks == 0
    assert (await mover.done(PullDone, 4)).error == "the node rests after failures"
    mover.push(5, ids, [_ROOT_ID, ids[0]], slots, starts=True)
    assert (await mover.done(PushDone, 5)) == PushDone(5, 0, "kv-1", 0, False)
    keys = itertools.count(6)
    async with asyncio.timeout(PATIENCE_S):
        while not mover.failing:
            mover.pull(key := next(keys), ids, [10, 11], run_at(node.peer, 0, 2, epoch=0, name="kv-1"))
            await mover.done(PullDone, key)
    assert mover.failing[0] == NodeFailing("kv-1", 0)
