"""Random parts from ranks of several sizes, good and bad, in any order, against a plain dict of verified heads.

The dict knows which heads of which block were accepted and are not known to be gone. A store may have lost blocks; it
must never show one of which a head is missing, other bytes, a gap in a prefix, or hold memory for nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from services.common.announcements import Tier
from services.common.blocks import BlockId, owner_of
from services.common.transfer.header import NO_OWNER, decode_header, verify_block
from services.common.transfer.heads import HeadRange
from services.common.transfer.protocol import PullRequest
from services.kvstore.arena import Arena
from services.kvstore.clearing import Clearing
from services.kvstore.part_reservation import PartReservation
from services.kvstore.ram_tier import RamTier
from services.kvstore.reservations import StoreReservation
from services.kvstore.store import Store
from tests.common.transfer.blocks import chain
from tests.kvstore.parts import BLOCK_BYTES, NUM_HEADS, WHOLE, format_of, offer, part_header, share
from tests.kvstore.ssd import Announced

_R = TypeVar("_R")
_CHAINS, _LENGTH, _OWNERS, _RAM_BLOCKS = 5, 6, 2, 24
_RANKS = [HeadRange(first, size) for size in (1, 2, 4) for first in range(0, NUM_HEADS, size)]
_UNALIGNED = [HeadRange(1, 2), HeadRange(0, 3)]
# A chain number and what was offered of it.
Offer = tuple[StoreReservation | PartReservation, list[BlockId], HeadRange, int]


class PartialsMachine(RuleBasedStateMachine):
    """RAM for 24 blocks, three of which may be incomplete at a time. Owners are cleared by generations."""

    offers = Bundle("offers")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.open_offers: list[Offer] = []
        self.generation = [0] * _OWNERS
        self.accepted: dict[BlockId, set[int]] = {}

    @initialize()
    def start(self) -> None:
        self.announced = Announced()
        self.ram = RamTier(Arena(_RAM_BLOCKS * BLOCK_BYTES))
        # Expired by a rule, not by the clock.
        self.store = Store(self.ram, self.announced, epoch=5, partial_bytes=3 * BLOCK_BYTES, partial_max_age_s=1e6)

    def run(self, work: Coroutine[object, object, _R]) -> _R:
        return self.loop.run_until_complete(asyncio.wait_for(work, 30))

    def owner(self, number: int) -> bytes:
        return owner_of(bytes([number % _OWNERS + 1]) * 8, self.generation[number % _OWNERS])

    def ids(self, number: int) -> list[BlockId]:
        """Raising the generation changes a chain's ids, as the tenant's root does."""
        return chain(_LENGTH, number + _CHAINS * self.generation[number % _OWNERS])

    def begin(self, number: int, first: int, count: int, heads: HeadRange, spoil: int) -> Offer:
        ids = self.ids(number)[: first + count]
        opened = self.run(offer(self.store, ids, heads, first=first, owner=self.owner(number), spoil=spoil))
        return opened, ids[first:], heads, spoil - first

    def end(self, opened: Offer) -> None:
        reservation, ids, heads, spoil = opened
        held = self.run(reservation.commit())
        assert held <= (spoil if reservation.num_held <= spoil < len(ids) else len(ids))
        for block_id in ids[:held]:
            self.accepted.setdefault(block_id, set()).update(range(heads.first, heads.end))

    @rule(
        number=st.integers(0, _CHAINS - 1),
        first=st.integers(0, 3),
        count=st.integers(1, 3),
        heads=st.sampled_from(_RANKS + _UNALIGNED),
        spoil=st.integers(-8, 5),
    )
    def push(self, number: int, first: int, count: int, heads: HeadRange, spoil: int) -> None:
        self.end(self.begin(number, first, count, heads, spoil))

    @rule(number=st.integers(0, _CHAINS - 1), heads=st.sampled_from(_UNALIGNED))
    def push_garbage_over(self, number: int, heads: HeadRange) -> None:
        """Over heads that are here and others that are not."""
        self.end(self.begin(number, 0, 1, HeadRange(0, 2), -8))
        self.end(self.begin(number, 0, 1, heads, 0))
        self.end(self.begin(number, 0, 1, HeadRange(2, 2), -8))

    @rule(number=st.integers(0, _CHAINS - 1), order=st.permutations(range(4)), size=st.sampled_from([1, 2]))
    def push_from_all_ranks(self, number: int, order: Sequence[int], size: int) -> None:
        for rank in order:
            if (rank + 1) * size <= NUM_HEADS:
                self.end(self.begin(number, 0, 3, HeadRange(rank * size, size), -8))

    @rule(
        target=offers,
        number=st.integers(0, _CHAINS - 1),
        first=st.integers(0, 2),
        count=st.integers(1, 3),
        heads=st.sampled_from(_RANKS),
    )
    def offer(self, number: int, first: int, count: int, heads: HeadRange) -> Offer | object:
        if len(self.open_offers) >= 4:
            return multiple()
        self.open_offers.append(self.begin(number, first, count, heads, -8))
        return self.open_offers[-1]

    @rule(taken=consumes(offers), comes=st.booleans())
    def settle(self, taken: Offer, comes: bool) -> None:
        """The payloads of an offer have come, or its rank has died in between."""
        if taken not in self.open_offers:
            return
        self.open_offers.remove(taken)
        if comes:
            self.end(taken)
        else:
            taken[0].abandon()

    @rule(number=st.integers(0, _CHAINS - 1), field=st.sampled_from(["owner", "model"]))
    def push_what_does_not_belong(self, number: int, field: str) -> None:
        """Beside a part that is here."""
        first, last = HeadRange(0, 1), HeadRange(3, 1)
        self.end(self.begin(number, 0, 1, first, -8))
        ids, owner = self.ids(number), self.owner(number)
        here = decode_header(part_header(ids, 0, first, share(ids[0], first), owner=owner))
        is_partial = ids[0] not in self.ram and self.store.partials.holds(here)
        other = owner_of(b"z" * 8, 0) if field == "owner" else owner
        block_format = format_of(model=b"n" * 16) if field == "model" else None
        odd = part_header(ids, 0, last, share(ids[0], last), owner=other, block_format=block_format)
        reservation = self.run(self.store.reserve([odd], 0))
        reservation.abandon()
        assert not is_partial or (reservation.num_held, list(reservation.buffers)) == (0, [])

    @rule(number=st.integers(0, _CHAINS - 1), heads=st.sampled_from([None, *_RANKS, *_UNALIGNED]))
    def pull(self, number: int, heads: HeadRange | None) -> None:
        ids = self.ids(number)
        lease = self.run(self.store.lease(PullRequest(ids, 0, 5.0, heads=heads)))
        for block_id, block in zip(ids, lease.blocks, strict=False):
            verify_block(block.header, block.payload, block_id, format_of(), heads)
            assert bytes(block.payload) == share(block_id, heads or WHOLE), "wrong bytes"
            assert decode_header(block.header).part is None
            assert self.accepted[block_id] == set(range(NUM_HEADS)), "a block of which heads never came"
        lease.release(len(lease.blocks), lease.stop)

    @rule()
    def expire(self) -> None:
        self.store.partials.expire(float("inf"))
        assert len(self.store.partials) == 0
        self.accepted = {block_id: heads for block_id, heads in self.accepted.items() if block_id in self.ram}

    @rule(number=st.integers(100, 110))
    def evict(self, number: int) -> None:
        ids = chain(_LENGTH, number)
        self.end((self.run(offer(self.store, ids, WHOLE)), ids, WHOLE, -8))

    @rule(owner=st.integers(0, _OWNERS - 1))
    def clear(self, owner: int) -> None:
        if self.generation[owner] > 12:
            return
        self.generation[owner] += 1
        self.run(Clearing(self.store).carry_out({bytes([owner + 1]) * 8: self.generation[owner]}))

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "store"):
            return
        self.ram.check()
        self.store.partials.check()
        assert set(self.announced.tiers.values()) <= {Tier.RAM}
        for block_id, heads in self.accepted.items():
            # Evicted, or whole without a parent.
            if len(heads) == NUM_HEADS and block_id not in self.ram:
                heads.clear()
        for block_id in self.announced.tiers:
            entry = self.ram.peek(block_id)
            assert entry is not None
            assert bytes(self.ram.view(entry)) == share(block_id, WHOLE), "wrong bytes"
            assert self.accepted[block_id] == set(range(NUM_HEADS))
        assert len(self.announced.tiers) == len(self.ram)
        for number in range(_CHAINS):
            listed = [block_id in self.announced.tiers for block_id in self.ids(number)]
            assert listed == sorted(listed, reverse=True)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for reservation, *_ in self.open_offers:
                reservation.abandon()
            self.store.partials.expire(float("inf"))
            assert self.store.partials.statistics().num_bytes == 0
            assert self.ram.statistics().leased_blocks == 0
            owners = [NO_OWNER, *(owner_of(bytes([owner + 1]) * 8, 0) for owner in range(_OWNERS))]
            assert sum(map(self.ram.owner_bytes, owners)) == self.ram.statistics().num_bytes
        self.loop.close()


TestPartials = PartialsMachine.TestCase
TestPartials.settings = settings(max_examples=60, stateful_step_count=40)
