"""Random pushes, pulls, leases, evictions, flushes, crashes, restarts and clears against a plain dict.

The dict knows every block that was ever pushed and not cleared since; a store may have lost any of them, and must
never have another one, other bytes, a gap in a prefix, or an announcement that is not so.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from services.common.announcements import Tier
from services.common.blocks import TENANT_TAG_BYTES, BlockId
from services.common.transfer.protocol import PullRequest
from services.kvstore.clearing import Clearing
from services.kvstore.store import StoreLease, StoreReservation
from tests.common.transfer.blocks import chain, payload
from tests.kvstore.ssd import BLOCK_BYTES, Opened, flushed, offer, opened, owner, pull, push

_R = TypeVar("_R")
_MAX_BLOCKS = 10
# Chain number modulo this is its owner.
_OWNERS = 3


def letter_of(number: int) -> str:
    """Whose a chain is."""
    return "abc"[number % _OWNERS]


class StoreMachine(RuleBasedStateMachine):
    """Six segments of at most 30 blocks below 32 blocks of RAM."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kvmesh-test-"))
        self.loop = asyncio.new_event_loop()
        self.model: dict[BlockId, str] = {}
        self.leased: list[tuple[StoreLease, list[BlockId]]] = []
        self.path = self.folder / "0"
        self.encrypt = True
        self.generations = dict.fromkeys("abc", 0)
        self.offers: list[tuple[StoreReservation, list[BlockId], str, int]] = []

    @initialize(encrypt=st.booleans())
    def open(self, encrypt: bool) -> None:
        self.encrypt = encrypt
        self.start()

    def start(self) -> None:
        self.context = opened(self.path, ssd_encrypt=self.encrypt, owner_ssd_bytes=50 * BLOCK_BYTES)
        self.one: Opened = self.run(self.context.__aenter__())
        self.clearing = Clearing(self.one.store)
        # As a node does before anybody is told what it holds.
        for letter, generation in self.generations.items():
            self.run(self.clear_in(letter, generation))

    async def clear_in(self, letter: str, generation: int) -> None:
        await self.clearing.carry_out({owner(letter)[:TENANT_TAG_BYTES]: generation})

    def stop(self) -> None:
        for lease, _ in self.leased:
            lease.release(0, "")
        self.leased.clear()
        for reservation, *_ in self.offers:
            reservation.abandon()
        self.offers.clear()
        self.run(self.context.__aexit__(None, None, None))

    def run(self, work: Coroutine[object, object, _R]) -> _R:
        async def bounded() -> _R:
            async with asyncio.timeout(30):
                return await work

        return self.loop.run_until_complete(bounded())

    @rule(number=st.integers(0, 11), first=st.integers(0, 3), count=st.integers(1, _MAX_BLOCKS))
    def put(self, number: int, first: int, count: int) -> None:
        ids = chain(max(first + 1, count), number)
        held = self.run(push(self.one.store, ids, first=first, owner=self.owner_of(number)))
        self.model.update((block_id, letter_of(number)) for block_id in ids[first : first + held])

    def owner_of(self, number: int) -> bytes:
        return owner(letter_of(number), self.generations[letter_of(number)])

    @rule(number=st.integers(0, 11), count=st.integers(1, _MAX_BLOCKS))
    def offer(self, number: int, count: int) -> None:
        letter, ids = letter_of(number), chain(count, number)
        if len(self.offers) < 3:
            reservation = self.run(offer(self.one.store, ids, owner=self.owner_of(number)))
            self.offers.append((reservation, ids, letter, self.generations[letter]))

    @rule()
    def commit(self) -> None:
        """What was offered before a clearing does not come to be here after it."""
        for reservation, ids, letter, generation in self.offers:
            held = self.run(reservation.commit())
            assert not held or generation == self.generations[letter]
            self.model.update((block_id, letter) for block_id in ids[:held])
        self.offers.clear()

    @rule(number=st.integers(0, 11), count=st.integers(1, _MAX_BLOCKS))
    def put_late(self, number: int, count: int) -> None:
        letter = letter_of(number)
        if self.generations[letter]:
            late = owner(letter, self.generations[letter] - 1)
            assert self.run(push(self.one.store, chain(count, number), owner=late)) == 0

    @rule(number=st.integers(0, 11), first=st.integers(0, 1))
    def get(self, number: int, first: int) -> None:
        ids = chain(_MAX_BLOCKS, number)
        known = next((i for i, block_id in enumerate(ids) if block_id not in self.model), len(ids))
        # A pull may begin anywhere: what is here has all its ancestors here too.
        found = self.run(pull(self.one.store, ids[first:]))
        assert first + len(found) <= max(known, first)

    @rule(target=leases, number=st.integers(0, 11))
    def lease(self, number: int) -> tuple[StoreLease, list[BlockId]]:
        ids = chain(4, number)
        lease = self.run(self.one.store.lease(PullRequest(ids, 0, 10.0)))
        self.leased.append((lease, ids))
        return lease, ids

    @rule(taken=consumes(leases))
    def release(self, taken: tuple[StoreLease, list[BlockId]]) -> None:
        if taken not in self.leased:
            return
        lease, ids = taken
        for block_id, block in zip(ids, lease.blocks, strict=False):
            assert bytes(block.payload) == payload(block_id, BLOCK_BYTES), "a lent block changed"
        lease.release(len(lease.blocks), lease.stop)
        self.leased.remove(taken)

    @rule(number=st.integers(20, 40))
    def evict(self, number: int) -> None:
        ids = chain(8, number)
        held = self.run(push(self.one.store, ids, owner=self.owner_of(number)))
        self.model.update((block_id, letter_of(number)) for block_id in ids[:held])

    @rule()
    def flush(self) -> None:
        self.run(flushed(self.one))

    @rule(letter=st.sampled_from("abc"))
    def clear(self, letter: str) -> None:
        self.generations[letter] += 1
        self.run(self.clear_in(letter, self.generations[letter]))
        self.model = {block_id: kept for block_id, kept in self.model.items() if kept != letter}

    @rule()
    def restart(self) -> None:
        self.run(flushed(self.one))
        self.stop()
        self.start()

    @rule()
    def crash(self) -> None:
        """The files as they are this moment are what a new process finds."""
        copy = self.folder / str(int(self.path.name) + 1)
        shutil.copytree(self.path, copy)
        self.stop()
        shutil.rmtree(self.path)
        self.path = copy
        self.start()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "one"):
            return
        self.one.layer.tier.check()
        self.one.ram.check()
        assert self.one.layer.tier.is_on
        announced = self.one.announced.tiers
        assert set(announced) <= set(self.model)
        for block_id, tier in announced.items():
            assert (block_id in self.one.ram) == (tier == Tier.RAM)
            assert tier == Tier.RAM or block_id in self.one.layer.tier
        for number in (*range(12), *range(20, 41)):
            listed = [block_id in announced for block_id in chain(_MAX_BLOCKS, number)]
            assert listed == sorted(listed, reverse=True)

    def teardown(self) -> None:
        if hasattr(self, "one"):
            self.stop()
            assert self.one.store.statistics().ram.leased_blocks == 0
        self.loop.close()
        shutil.rmtree(self.folder)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=25, stateful_step_count=30)
