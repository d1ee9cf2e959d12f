"""The RAM tier against a plain model, and what its order of eviction is for."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from services.common.blocks import BlockId
from services.common.transfer.shm_directory import BlockDirectory, DirectoryReader
from services.kvstore.arena import Arena
from services.kvstore.ram_tier import Entry, RamTier

_SLOT = 4096
_CAPACITY = 16 * _SLOT
# A directory with a bucket for each id.
_LISTED_BYTES = 64 * 2**20


def _id(number: int) -> BlockId:
    return BlockId(number.to_bytes(16, "little"))


def _put(tier: RamTier, number: int, parent: int | None) -> tuple[bool, list[BlockId]]:
    slot, victims = tier.allocate(_SLOT)
    gone = [entry.block_id for entry in victims]
    if slot is None:
        return False, gone
    kept = tier.insert(_id(number), None if parent is None else _id(parent), slot, b"header %d" % number)
    if not kept:
        tier.discard(slot)
    return kept, gone


class RamTierMachine(RuleBasedStateMachine):
    """Random pushes, pulls and releases. The model is a dict of parents; every id is a prefix-tree node."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.directory = BlockDirectory.create(_LISTED_BYTES, 1)
        self.tier = RamTier(Arena(_CAPACITY), directory=self.directory)
        self.parents: dict[int, int | None] = {}
        self.leased: list[list[Entry]] = []

    @rule(number=st.integers(0, 60))
    def push(self, number: int) -> None:
        parent = None if number < 4 else number // 2
        kept, gone = _put(self.tier, number, parent)
        for block_id in gone:
            victim = int.from_bytes(block_id, "little")
            assert all(entry.block_id != block_id for lease in self.leased for entry in lease)
            assert victim not in self.parents.values(), "a parent went before its child"
            del self.parents[victim]
        if kept:
            assert number not in self.parents
            assert parent is None or parent in self.parents
            self.parents[number] = parent
        else:
            assert number in self.parents or (parent is not None and parent not in self.parents) or self._is_full()

    @rule(target=leases, number=st.integers(0, 60))
    def pull(self, number: int) -> list[Entry]:
        path = [number]
        while path[0] >= 4:
            path.insert(0, path[0] // 2)
        entries = self.tier.lease([_id(step) for step in path])
        assert [entry.block_id for entry in entries] == [_id(step) for step in path[: len(entries)]]
        assert len(entries) == len(path) or path[len(entries)] not in self.parents
        self.leased.append(entries)
        return entries

    @rule(entries=consumes(leases))
    def release(self, entries: list[Entry]) -> None:
        self.tier.release(entries)
        self.leased = [lease for lease in self.leased if lease is not entries]

    @invariant()
    def agrees(self) -> None:
        self.tier.check()
        assert len(self.tier) == len(self.parents)
        assert all(_id(number) in self.tier for number in self.parents)
        assert self.tier.statistics().num_bytes == len(self.parents) * _SLOT

    @invariant()
    def lists_what_is_here(self) -> None:
        if self.directory is None:
            return
        reader = DirectoryReader(self.directory.region.view)
        for number in range(61):
            listed, entry = reader.find(_id(number)), self.tier.peek(_id(number))
            assert (listed is None) == (entry is None)
            if listed is not None and entry is not None:
                assert (listed.place, listed.header) == ((0, entry.slot.offset, _SLOT), entry.header)
        assert all(parent is None or parent in self.parents for parent in self.parents.values())

    def _is_full(self) -> bool:
        held = {entry.block_id for lease in self.leased for entry in lease}
        parents = set(self.parents.values())
        return all(_id(number) in held or number in parents for number in self.parents)


TestRamTier = RamTierMachine.TestCase
TestRamTier.settings = settings(max_examples=60, stateful_step_count=60)


def test_a_scan_does_not_push_out_what_is_used() -> None:
    tier = RamTier(Arena(64 * _SLOT))
    hot = range(1, 41)
    for number in hot:
        _put(tier, number, None)
        tier.release(tier.lease([_id(number)]))
    for number in range(1000, 1600):
        _put(tier, number, None)
    assert sum(_id(number) in tier for number in hot) == len(hot)


def test_a_block_that_comes_back_soon_stays_longer() -> None:
    tier = RamTier(Arena(16 * _SLOT))
    for number in range(1, 18):
        _put(tier, number, None)
    assert _id(1) not in tier
    _put(tier, 1, None)
    for number in range(100, 130):
        _put(tier, number, None)
    assert _id(1) in tier


def test_descendants_go_first_and_the_prefix_stays() -> None:
    tier = RamTier(Arena(16 * _SLOT))
    for number in range(16):
        _put(tier, number, number - 1 if number else None)
    gone: list[BlockId] = []
    for number in range(100, 104):
        _, victims = _put(tier, number, None)
        gone += victims
    assert gone[0] == _id(15)
    chain = [block_id for block_id in gone if int.from_bytes(block_id, "little") < 100]
    assert chain == [_id(15 - i) for i in range(len(chain))]


def test_blocks_of_several_sizes_share_the_arena() -> None:
    arena = Arena(64 * _SLOT)
    tier = RamTier(arena)
    for number in range(64):
        _put(tier, number, None)
    big = arena.slab_bytes
    slot, gone = tier.allocate(big)
    assert slot is not None
    assert len(gone) >= big // _SLOT
    assert tier.insert(_id(999), None, slot, b"")
    too_big, none_gone = tier.allocate(big + 1)
    assert too_big is None
    assert none_gone == []
    tier.check()


def test_nothing_that_is_lent_goes() -> None:
    tier = RamTier(Arena(16 * _SLOT))
    for number in range(16):
        _put(tier, number, None)
    entries = [tier.lease([_id(number)]) for number in range(16)]
    slot, gone = tier.allocate(_SLOT)
    assert slot is None
    assert gone == []
    tier.release(entries[3])
    slot, gone = tier.allocate(_SLOT)
    assert slot is not None
    assert [entry.block_id for entry in gone] == [_id(3)]
