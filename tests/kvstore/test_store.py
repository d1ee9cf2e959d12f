"""The store without a transport: what it announces, keeps and reports."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.common.announcements import Tier
from services.common.blocks import BlockId
from services.common.transfer.protocol import PullRequest
from services.kvstore import lending
from services.kvstore.arena import Arena
from services.kvstore.part_reservation import PartReservation
from services.kvstore.ram_tier import RamTier
from services.kvstore.reservations import StoreReservation
from services.kvstore.store import Store
from tests.common.transfer.blocks import chain, header, payload

_BLOCK_BYTES = 192 * 16
_EPOCH = 5


class Announced:
    """The announcer's part, kept as a dict."""

    def __init__(self) -> None:
        self.tiers: dict[BlockId, Tier] = {}

    def add(self, ids: Sequence[BlockId], tier: Tier) -> None:
        self.tiers.update(dict.fromkeys(ids, tier))

    def remove(self, ids: Sequence[BlockId]) -> None:
        for block_id in ids:
            del self.tiers[block_id]


@pytest.fixture
def announced() -> Announced:
    return Announced()


@pytest.fixture
def store(announced: Announced) -> Store:
    return Store(RamTier(Arena(64 * 4096)), announced, epoch=_EPOCH)


async def offer(store: Store, ids: list[BlockId], *, epoch: int = 0) -> StoreReservation | PartReservation:
    """A reservation whose buffers hold what was offered."""
    data = [payload(block_id, _BLOCK_BYTES) for block_id in ids]
    reservation = await store.reserve([header(ids, i, block) for i, block in enumerate(data)], epoch)
    for buffer, block in zip(reservation.buffers, data[reservation.num_held :], strict=False):
        buffer[:] = block
    return reservation


async def test_the_same_blocks_offered_twice_at_once_are_kept_once(store: Store, announced: Announced) -> None:
    ids = chain(6)
    first, second = await offer(store, ids), await offer(store, ids[:4])
    assert (len(first.buffers), len(second.buffers)) == (6, 4)
    assert await second.commit() == 4
    assert await first.commit() == 6
    assert announced.tiers == dict.fromkeys(ids, Tier.RAM)
    assert store.statistics().ram.num_blocks == 6
    assert store.statistics().ram.leased_blocks == 0


async def test_a_reservation_given_up_leaves_nothing(store: Store, announced: Announced) -> None:
    kept = chain(2)
    await (await offer(store, kept)).commit()
    reservation = await offer(store, chain(6))
    assert reservation.num_held == 2
    assert store.statistics().ram.leased_blocks == 1
    reservation.abandon()
    assert store.statistics().ram.leased_blocks == 0
    assert list(announced.tiers) == kept


async def test_what_a_reservation_hangs_on_is_not_evicted_meanwhile(store: Store) -> None:
    await (await offer(store, chain(2))).commit()
    reservation = await offer(store, chain(4))
    for number in range(1, 30):
        await (await offer(store, chain(8, number))).commit()
    assert store.totals.evicted_blocks > 0
    assert await reservation.commit() == 4


async def test_another_epoch_is_refused(store: Store) -> None:
    reservation = await offer(store, chain(2), epoch=_EPOCH + 1)
    assert list(reservation.buffers) == []
    assert await reservation.commit() == 0
    assert store.totals.rejected_blocks == 2
    assert (await offer(store, chain(2), epoch=_EPOCH)).buffers


async def test_announcements_follow_evictions(store: Store, announced: Announced) -> None:
    for number in range(40):
        await (await offer(store, chain(5, number))).commit()
    assert store.totals.evicted_blocks > 0
    assert len(announced.tiers) == store.statistics().ram.num_blocks
    for number in range(40):
        held = [block_id in announced.tiers for block_id in chain(5, number)]
        assert held == sorted(held, reverse=True)


async def test_a_pull_is_a_span_of_the_pullers_trace(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(lending, "_tracer", provider.get_tracer("test"))
    ids = chain(3)
    await (await offer(store, ids)).commit()
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    lease = await store.lease(PullRequest([*ids, *chain(1, 9)], _EPOCH, 1.0, traceparent, "req-1"))
    assert store.totals.open_leases == 1
    lease.release(3, "missing")
    (span,) = exporter.get_finished_spans()
    assert span.name == "kvstore.pull"
    assert span.context is not None
    assert span.parent is not None
    assert f"{span.context.trace_id:032x}" == traceparent.split("-")[1]
    assert f"{span.parent.span_id:016x}" == traceparent.split("-")[2]
    assert dict(span.attributes or {})["kvmesh.sent_blocks"] == 3
    assert (store.totals.hit_blocks, store.totals.miss_blocks, store.totals.open_leases) == (3, 1, 0)
    provider.shutdown()
