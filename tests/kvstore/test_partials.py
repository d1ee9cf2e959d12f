"""Blocks that come in parts, at the store: when they become visible, what is refused, what goes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from services.common.announcements import Tier
from services.common.blocks import TENANT_TAG_BYTES, BlockId, owner_of, split_owner
from services.common.transfer.header import decode_header, verify_block
from services.common.transfer.heads import HeadRange
from services.common.transfer.protocol import STOP_HEADS, PullRequest
from services.kvstore.arena import Arena
from services.kvstore.clearing import Clearing
from services.kvstore.ram_tier import RamTier
from services.kvstore.store import Store
from tests.common.transfer.blocks import chain, payload
from tests.kvstore.parts import BLOCK_BYTES, LEFT, NUM_HEADS, RIGHT, WHOLE, format_of, offer, part_header, push, share
from tests.kvstore.ssd import Announced
from tests.support.waiting import eventually

_OTHER_OWNER = owner_of(b"x" * TENANT_TAG_BYTES, 3)


class Opened:
    """A store of 64 blocks, eight of which may be incomplete."""

    def __init__(self, *, max_age_s: float = 60.0) -> None:
        self.announced = Announced()
        self.ram = RamTier(Arena(64 * BLOCK_BYTES))
        self.store = Store(self.ram, self.announced, epoch=5, partial_max_age_s=max_age_s)

    async def pulled(self, ids: list[BlockId], heads: HeadRange | None = None) -> int:
        """How many blocks come, each compared with what was pushed."""
        lease = await self.store.lease(PullRequest(ids, 0, 5.0, heads=heads))
        for block, block_id in zip(lease.blocks, ids, strict=False):
            verify_block(block.header, block.payload, block_id, format_of(), heads)
            assert bytes(block.payload) == share(block_id, heads or WHOLE)
        lease.release(len(lease.blocks), lease.stop)
        return len(lease.blocks)

    def check(self) -> None:
        self.ram.check()
        self.store.partials.check()


@pytest.fixture
def opened() -> Opened:
    return Opened()


async def test_a_block_is_visible_when_every_rank_has_pushed_it(opened: Opened) -> None:
    ids = chain(4)
    assert await push(opened.store, ids, LEFT) == 4
    assert (opened.announced.tiers, await opened.pulled(ids), opened.store.totals.pushed_blocks) == ({}, 0, 0)
    assert opened.store.partials.statistics().num_blocks == 4
    assert await push(opened.store, ids[:3], RIGHT) == 3
    assert opened.announced.tiers == dict.fromkeys(ids[:3], Tier.RAM)
    assert await opened.pulled(ids) == 3
    assert await push(opened.store, ids, RIGHT) == 4
    assert await opened.pulled(ids) == 4
    assert opened.store.partials.statistics().num_bytes == 0
    lease = await opened.store.lease(PullRequest(ids, 0, 5.0))
    # As if they had come whole.
    for i, block in enumerate(lease.blocks):
        assert block.header == part_header(ids, i, WHOLE, payload(ids[i], BLOCK_BYTES))
    lease.release(4, "")
    opened.check()


async def test_ranks_of_any_number_join(opened: Opened) -> None:
    ids = chain(3)
    for head in (2, 0, 3, 1):
        assert await opened.pulled(ids) == 0
        assert await push(opened.store, ids, HeadRange(head, 1)) == 3
    assert await opened.pulled(ids) == 3
    for heads in (LEFT, RIGHT, HeadRange(1, 2), WHOLE):
        assert await opened.pulled(ids, heads) == 3
    lease = await opened.store.lease(PullRequest(ids, 0, 5.0, heads=HeadRange(3, 2)))
    assert (lease.blocks, lease.stop) == ([], STOP_HEADS)
    lease.release(0, lease.stop)
    assert opened.store.statistics().ram.leased_blocks == 0


async def test_a_part_needs_the_same_heads_of_its_parent(opened: Opened) -> None:
    ids = chain(6)
    assert await push(opened.store, ids, LEFT, first=2) == 0
    await push(opened.store, ids[:2], LEFT)
    assert await push(opened.store, ids, RIGHT, first=2) == 0
    assert await push(opened.store, ids, LEFT, first=2) == 4
    assert await push(opened.store, ids, HeadRange(1, 1), first=2) == 4
    await push(opened.store, ids[:2], RIGHT)
    assert await push(opened.store, ids, RIGHT, first=2) == 4
    assert await opened.pulled(ids) == 6
    opened.check()


async def test_a_repeated_part_need_not_come_again(opened: Opened) -> None:
    ids = chain(3)
    await push(opened.store, ids, LEFT)
    again = await offer(opened.store, ids, LEFT)
    assert (again.num_held, list(again.buffers), await again.commit()) == (3, [], 3)
    assert opened.store.totals.rejected_blocks == 0


async def test_of_two_contents_the_first_verified_one_stays(opened: Opened) -> None:
    """While one is on its way another is refused; a wrong one leaves room for the right one."""
    ids = chain(1)
    wrong = await offer(opened.store, ids, LEFT, spoil=0)
    assert await push(opened.store, ids, LEFT) == 0
    assert await push(opened.store, ids, HeadRange(1, 2)) == 0
    assert await push(opened.store, ids, RIGHT) == 1
    assert await wrong.commit() == 0
    assert opened.store.totals.verification_failures == 1
    other = bytes(BLOCK_BYTES // 2)
    assert await push(opened.store, ids, LEFT) == 1
    late = await opened.store.reserve([part_header(ids, 0, LEFT, other)], 0)
    assert (late.num_held, list(late.buffers)) == (1, [])
    assert await opened.pulled(ids) == 1
    opened.check()


async def test_nothing_is_written_over_a_verified_part(opened: Opened) -> None:
    ids = chain(1)
    await push(opened.store, ids, LEFT)
    for heads in (HeadRange(1, 2), HeadRange(0, 3)):
        assert list((await offer(opened.store, ids, heads)).buffers) == []
    await push(opened.store, ids, RIGHT)
    assert await opened.pulled(ids) == 1


async def test_a_bad_part_cuts_the_offer(opened: Opened) -> None:
    ids = chain(4)
    await push(opened.store, ids, LEFT)
    assert await push(opened.store, ids, RIGHT, spoil=2) == 2
    assert await opened.pulled(ids) == 2
    assert await push(opened.store, ids, RIGHT) == 4
    assert await opened.pulled(ids) == 4


@pytest.mark.parametrize("what", ["model", "owner", "parent", "start", "shape", "dtype", "heads"])
async def test_parts_that_do_not_belong_together_are_refused(opened: Opened, what: str) -> None:
    ids = chain(2)
    await push(opened.store, ids, LEFT)
    data = share(ids[1], RIGHT)
    header = decode_header(part_header(ids, 1, RIGHT, data))
    (segment,) = header.segments
    changed = {
        "model": replace(header, model_digest=b"n" * 16),
        "owner": replace(header, owner_digest=_OTHER_OWNER),
        "parent": replace(header, parent_id=BlockId(b"p" * 16)),
        "start": replace(header, starts_chain=True),
        "shape": replace(header, segments=(replace(segment, shape=(NUM_HEADS, 1, 2, 32, 8)),)),
        "dtype": replace(header, kv_dtype="float16"),
        "heads": replace(header, part_of=8),
    }[what]
    reservation = await opened.store.reserve([part_header(ids, 0, RIGHT, share(ids[0], RIGHT)), changed.encode()], 0)
    assert len(reservation.buffers) == 1
    reservation.abandon()
    assert opened.store.totals.rejected_blocks == 1
    # Nor alone, nor when all that it says but that is so.
    await push(opened.store, ids[:1], RIGHT)
    alone = await opened.store.reserve([changed.encode()], 0)
    assert (alone.num_held, list(alone.buffers)) == (0, [])
    assert await alone.commit() == 0
    assert await push(opened.store, ids, RIGHT) == 2
    assert await opened.pulled(ids) == 2
    opened.check()


async def test_an_offer_is_of_the_same_heads(opened: Opened) -> None:
    ids = chain(3)
    headers = [part_header(ids, i, heads, share(ids[i], heads)) for i, heads in enumerate((LEFT, LEFT, RIGHT))]
    reservation = await opened.store.reserve(headers, 0)
    assert [len(buffer) for buffer in reservation.buffers] == [BLOCK_BYTES // 2] * 2
    reservation.abandon()
    whole = [part_header(ids, 0, WHOLE, share(ids[0], WHOLE)), part_header(ids, 1, LEFT, share(ids[1], LEFT))]
    reservation = await opened.store.reserve(whole, 0)
    assert [len(buffer) for buffer in reservation.buffers] == [BLOCK_BYTES]
    reservation.abandon()
    opened.check()


async def test_incomplete_blocks_are_bounded_in_bytes(opened: Opened) -> None:
    ids = chain(12)
    assert await push(opened.store, ids, LEFT) == 8
    now = opened.store.partials.statistics()
    assert now.num_bytes == now.max_bytes == 8 * BLOCK_BYTES
    assert opened.store.totals.rejected_blocks == 4
    assert await push(opened.store, ids, RIGHT) == 8
    assert await push(opened.store, ids, LEFT) == 12
    opened.check()


async def test_what_stays_incomplete_goes_by_itself_and_is_counted() -> None:
    opened = Opened(max_age_s=0.15)
    ids = chain(5)
    await push(opened.store, ids, LEFT)
    kept = chain(2, 1)
    await push(opened.store, kept, LEFT)
    await push(opened.store, kept, RIGHT)
    in_flight = await offer(opened.store, chain(1, 2), LEFT)
    await eventually(lambda: opened.store.totals.dropped_partial_blocks == 6)
    # The memory of what is being written is not given to others before its writer is done.
    assert opened.store.partials.statistics().num_bytes == BLOCK_BYTES
    assert await in_flight.commit() == 0
    assert opened.store.partials.statistics().num_bytes == 0
    assert await opened.pulled(kept) == 2
    assert opened.ram.statistics().num_blocks == 2
    assert await push(opened.store, ids, RIGHT) == 5
    assert await opened.pulled(ids) == 0
    opened.check()


async def test_a_rank_that_gives_up_leaves_the_others_parts(opened: Opened) -> None:
    ids = chain(3)
    (await offer(opened.store, ids, LEFT)).abandon()
    assert opened.store.partials.statistics().num_blocks == 0
    await push(opened.store, ids, LEFT)
    (await offer(opened.store, ids, RIGHT)).abandon()
    assert opened.store.partials.statistics().num_blocks == 3
    assert opened.store.totals.dropped_partial_blocks == 0
    assert await push(opened.store, ids, RIGHT) == 3
    assert await opened.pulled(ids) == 3
    opened.check()


async def test_ranks_write_at_the_same_time(opened: Opened) -> None:
    ids = chain(5)
    left, right = await offer(opened.store, ids, LEFT), await offer(opened.store, ids, RIGHT)
    assert len(left.buffers) == len(right.buffers) == 5
    assert await asyncio.gather(left.commit(), right.commit()) == [5, 5]
    assert await opened.pulled(ids) == 5
    opened.check()


async def test_a_whole_block_supersedes_its_parts(opened: Opened) -> None:
    ids = chain(4)
    await push(opened.store, ids, LEFT)
    right = await offer(opened.store, ids[:3], RIGHT)
    assert await push(opened.store, ids[:2], WHOLE) == 2
    assert await opened.pulled(ids) == 2
    # The parts of the first two need not be kept any more; the third hangs on a whole block now.
    assert await right.commit() == 0
    assert await push(opened.store, ids, RIGHT) == 4
    assert await opened.pulled(ids) == 4
    assert opened.store.partials.statistics().num_bytes == 0
    opened.check()


async def test_a_cleared_owner_has_no_parts_left(opened: Opened) -> None:
    ids, others = chain(3), chain(2, 1)
    await (await offer(opened.store, ids, LEFT, owner=_OTHER_OWNER)).commit()
    late = await offer(opened.store, ids, RIGHT, owner=_OTHER_OWNER)
    await push(opened.store, others, LEFT)
    clearing = Clearing(opened.store)
    await clearing.carry_out(dict([split_owner(_OTHER_OWNER)]))
    assert opened.store.partials.statistics().num_blocks == 5
    await clearing.carry_out({b"x" * TENANT_TAG_BYTES: 4})
    assert await late.commit() == 0
    assert (await offer(opened.store, ids, LEFT, owner=_OTHER_OWNER)).num_held == 0
    assert opened.store.partials.statistics().num_blocks == 2
    assert opened.announced.tiers == {}
    await push(opened.store, others, RIGHT)
    assert await opened.pulled(others) == 2
    opened.check()


async def test_a_parent_that_was_evicted_takes_nothing_with_it_but_the_child(opened: Opened) -> None:
    ids = chain(2)
    for heads in (LEFT, RIGHT):
        await push(opened.store, ids[:1], heads)
    await push(opened.store, ids, LEFT, first=1)
    for number in range(1, 30):
        await push(opened.store, chain(8, number), WHOLE)
    assert ids[0] not in opened.ram
    assert await push(opened.store, ids, RIGHT, first=1) == 0
    assert await opened.pulled(ids) == 0
    opened.check()
    await push(opened.store, ids[:1], WHOLE)
    assert await push(opened.store, ids, RIGHT, first=1) == 1
    assert await opened.pulled(ids) == 2


async def test_owners_pay_for_whole_blocks() -> None:
    announced = Announced()
    ram = RamTier(Arena(64 * BLOCK_BYTES), owner_bytes=3 * BLOCK_BYTES)
    store = Store(ram, announced, epoch=5)
    assert await push(store, chain(6), LEFT) == 3
    assert ram.owner_bytes(bytes(16)) == 3 * BLOCK_BYTES
    assert await push(store, chain(6), RIGHT) == 3
    assert len(announced.tiers) == 3
