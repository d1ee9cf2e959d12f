"""Snapshots of what is under way in a mover."""

from __future__ import annotations

import asyncio
import os

import pytest

from services.common.transfer.heads import HeadRange
from services.common.transfer.protocol import PullRequest
from services.worker.mover.counters import Counters
from services.worker.mover.pool import SharedPool
from services.worker.mover.serving import PinnedSource, SourceStatistics
from services.worker.mover_messages import PinBlocks, PinnedSlots, Unpin
from tests.common.transfer.blocks import block_format, chain

FORMAT = block_format(3 * 2**12)


@pytest.fixture
def pool() -> SharedPool:
    descriptor = os.memfd_create("pool")
    os.ftruncate(descriptor, 4 * FORMAT.block_bytes)
    return SharedPool(descriptor, 4, FORMAT.block_bytes)


async def test_leases_of_others_are_counted_while_they_last(pool: SharedPool) -> None:
    sent: list[PinBlocks | Unpin] = []
    heads = HeadRange(0, FORMAT.num_kv_heads)
    source = PinnedSource(pool, FORMAT, heads, 5, Counters(), sent.append)
    task = asyncio.create_task(source.lease(PullRequest(chain(2), 5, 2.0)))
    await asyncio.sleep(0)
    assert source.statistics() == SourceStatistics(num_leases=1, num_waiting=1)
    asked = sent[0]
    assert isinstance(asked, PinBlocks)
    source.pinned(PinnedSlots(asked.key, [0, 1]))
    lease = await task
    assert source.statistics() == SourceStatistics(num_leases=1, num_waiting=0)
    lease.release(2, "")
    assert source.statistics() == SourceStatistics(num_leases=0, num_waiting=0)
