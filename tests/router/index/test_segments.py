"""Segments against the walk over every block, while what is held changes under them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.announcements import Tier
from services.common.blocks import BlockId
from services.router.index import segments
from services.router.index.block_map import BlockMap, HeldSet
from services.router.index.costly_walks import CostlyWalks
from tests.router.index.contents import contents


def _id(branch: int, at: int) -> BlockId:
    return BlockId(random.Random(branch * 1000 + at).randbytes(16))


# A tree: three prefixes that part after 12 blocks, two of which part after 20.
CHAINS = [[_id(0 if at < 12 else min(branch, 1) if at < 20 else branch, at) for at in range(30)] for branch in range(3)]
IDS = list(dict.fromkeys(id_ for chain in CHAINS for id_ in chain))


def naive(held: dict[BlockId, int], prompt: list[BlockId]) -> int:
    return next((at for at, id_ in enumerate(prompt) if id_ not in held), len(prompt))


class Mesh:
    """A block map beside plain dictionaries of what each set holds."""

    def __init__(self) -> None:
        self.blocks = BlockMap()
        self.wanted: dict[int, dict[BlockId, int]] = {}
        self.held: dict[int, HeldSet] = {}

    def new(self, number: int, *, is_shown: bool) -> None:
        self.held[number], self.wanted[number] = self.blocks.new_set(), {}
        if is_shown:
            self.blocks.show(self.held[number])

    def add(self, which: int, entries: list[tuple[BlockId, int]]) -> None:
        self.blocks.add(self.held[which], entries)
        self.wanted[which].update(entries)

    def remove(self, which: int, ids: list[BlockId]) -> None:
        self.blocks.remove(self.held[which], ids)
        for id_ in ids:
            self.wanted[which].pop(id_, None)

    def retire(self, which: int) -> None:
        self.blocks.retire(self.held.pop(which))
        del self.wanted[which]

    def sweep_all(self) -> None:
        while self.blocks.sweep():
            pass

    def check(self) -> None:
        """Counts and the segments' depths are what they should be."""
        for which, one in self.held.items():
            assert one.count == len(self.wanted[which])
        found = self.blocks._segments
        assert sum(len(one.ids) for one in found._by_use) == len(found.places)
        for segment in found._by_use:
            for offset, (id_, number) in enumerate(zip(segment.ids, segment.numbers, strict=True)):
                assert self.blocks._parts[id_[0]][id_] == number
                assert found.places[number] == (segment, offset)
            for which, one in self.held.items():
                segment.have_slots(one.slot + 1)
                assert segment.depths[one.slot] == naive(self.wanted[which], segment.ids)


def lengths_of(mesh: Mesh, prompt: list[BlockId]) -> dict[int, int]:
    lengths = mesh.blocks.find(prompt).lengths(mesh.blocks.num_slots)
    return {which: int(lengths[one.slot]) for which, one in mesh.held.items()}


def build(mesh: Mesh, ids: list[BlockId]) -> None:
    mesh.blocks._segments.build(ids, mesh.blocks.num_slots)


@settings(max_examples=200)
@given(st.data())
def test_a_lookup_through_segments_finds_what_the_walk_over_every_block_finds(data: st.DataObject) -> None:
    mesh, shown = Mesh(), set[int]()
    for number in range(data.draw(st.integers(1, 40))):
        action = data.draw(
            st.sampled_from(["new", "grow", "grow", "shrink", "shrink", "retire", "sweep", "build", "build"])
        )
        if action == "new" or not mesh.held:
            is_shown = data.draw(st.booleans()) or not mesh.held
            mesh.new(number, is_shown=is_shown)
            shown |= {number} if is_shown else set()
            continue
        which = data.draw(st.sampled_from(sorted(mesh.held)))
        chain = data.draw(st.sampled_from(CHAINS))
        depth = naive(mesh.wanted[which], chain)
        if action == "grow":
            tier = data.draw(st.sampled_from([Tier.HBM, Tier.SSD]))
            mesh.add(which, [(id_, tier) for id_ in chain[: data.draw(st.integers(depth, len(chain)))]])
        elif action == "shrink":
            mesh.remove(which, _from(chain[data.draw(st.integers(0, len(chain) - 1))]))
        elif action == "retire":
            mesh.retire(which)
            shown.discard(which)
        elif action == "sweep":
            for _ in range(data.draw(st.integers(1, 300))):
                mesh.blocks.sweep()
        else:
            first = data.draw(st.integers(0, len(chain) - 1))
            build(mesh, chain[first : data.draw(st.integers(first + 1, len(chain)))])
        mesh.check()
        prompt = data.draw(st.sampled_from(CHAINS))[: data.draw(st.integers(0, 30))]
        for which, length in lengths_of(mesh, prompt).items():
            assert length == (naive(mesh.wanted[which], prompt) if which in shown else 0)
    for which, one in list(mesh.held.items()):
        assert contents(mesh.blocks, one).keys() == mesh.wanted[which].keys()
        mesh.retire(which)
    mesh.sweep_all()
    assert (len(mesh.blocks), mesh.blocks.num_holder_sets, len(mesh.blocks._segments)) == (0, 0, 0)
    assert sorted(mesh.blocks._free_slots) == list(range(mesh.blocks.num_slots))


def _from(id_: BlockId) -> list[BlockId]:
    """The block and all after it in any prefix."""
    return [after for chain in CHAINS if id_ in chain for after in chain[chain.index(id_) :]]


@settings(max_examples=200)
@given(
    st.lists(st.sets(st.integers(0, 29)), min_size=1, max_size=6),
    st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.lists(st.integers(0, 29), max_size=12)), max_size=12),
    st.lists(st.integers(0, 29), max_size=3),
)
def test_depths_end_at_the_first_gap_whatever_the_order_of_changes(
    sets: list[set[int]], changes: list[tuple[bool, int, list[int]]], starts: list[int]
) -> None:
    mesh, chain = Mesh(), CHAINS[0]
    for number, held in enumerate(sets):
        mesh.new(number, is_shown=True)
        mesh.add(number, [(chain[at], Tier.HBM) for at in held])
    for start in starts:
        build(mesh, chain[start:])
    mesh.check()
    for is_add, which, places in changes:
        ids = [chain[at] for at in places]
        if is_add:
            mesh.add(which % len(sets), [(id_, Tier.HBM) for id_ in ids])
        else:
            mesh.remove(which % len(sets), ids)
        mesh.check()
    for which, end in lengths_of(mesh, chain).items():
        assert end >= naive(mesh.wanted[which], chain)
        assert end == 0 or chain[end - 1] in mesh.wanted[which]
        assert end == len(chain) or chain[end] not in mesh.wanted[which]


def test_a_prefix_that_many_hold_to_many_depths_becomes_a_segment_and_stays_right() -> None:
    draw = random.Random(3)
    chain = [_id(9, at) for at in range(300)]
    mesh = Mesh()
    for number in range(100):
        mesh.new(number, is_shown=True)
        mesh.add(number, [(id_, Tier.HBM) for id_ in chain[: draw.randint(0, 300)]])
    for turn in range(60):
        prompt = [*chain[: draw.randint(200, 300)], _id(10 + turn, 300)]
        assert lengths_of(mesh, prompt) == {which: naive(held, prompt) for which, held in mesh.wanted.items()}
        which = draw.randrange(100)
        depth = len(mesh.wanted[which])
        mesh.remove(which, chain[draw.randint(0, depth) :])
        mesh.add((which + 1) % 100, [(id_, Tier.HBM) for id_ in chain[: draw.randint(0, 300)]])
        mesh.check()
    assert len(mesh.blocks._segments) > 0


def test_segments_are_bounded_and_the_end_of_a_prefix_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MAX_BLOCKS", 40)
    mesh = Mesh()
    mesh.new(0, is_shown=True)
    mesh.add(0, [(id_, Tier.HBM) for id_ in IDS])
    build(mesh, CHAINS[0][:12])
    build(mesh, CHAINS[0][12:])
    build(mesh, CHAINS[1][12:20])
    lengths_of(mesh, CHAINS[0])
    build(mesh, CHAINS[1][20:])
    mesh.check()
    assert [segment.ids for segment in mesh.blocks._segments._by_use] == [
        CHAINS[0][12:],
        CHAINS[0][:12],
        CHAINS[1][20:],
    ]
    build(mesh, CHAINS[2][20:])
    assert [segment.ids for segment in mesh.blocks._segments._by_use] == [
        CHAINS[0][:12],
        CHAINS[1][20:],
        CHAINS[2][20:],
    ]
    mesh.check()


def test_a_stretch_is_worth_a_segment_once_its_walks_have_cost_more() -> None:
    walks, chain = CostlyWalks(), [_id(9, at) for at in range(512)]
    dense, sparse = [(at, 1) for at in range(12, 512, 2)], [(at, 1) for at in range(100, 500, 50)]
    assert [walks.count(chain, 0, dense) for _ in range(3)] == [False, False, True]
    assert not any(walks.count(chain, 0, sparse) for _ in range(1000))


def test_stretches_that_take_turns_in_great_number_are_worth_none() -> None:
    walks, runs = CostlyWalks(), [(at, 1) for at in range(1, 101)]
    chains = [[_id(20 + number, at) for at in range(100)] for number in range(129)]
    assert not any(walks.count(chain, 0, runs) for _ in range(20) for chain in chains)


@settings(max_examples=100)
@given(st.data())
def test_what_is_no_prefix_breaks_nothing(data: st.DataObject) -> None:
    """Blocks in any order, some of them twice or unknown: as a caller that is wrong might ask."""
    mesh = Mesh()
    for number in range(3):
        mesh.new(number, is_shown=True)
    for _ in range(data.draw(st.integers(1, 12))):
        ids = data.draw(st.lists(st.sampled_from(IDS), max_size=12))
        which = data.draw(st.integers(0, 2))
        if data.draw(st.booleans()):
            mesh.add(which, [(id_, Tier.HBM) for id_ in ids])
        else:
            mesh.remove(which, ids)
        build(mesh, data.draw(st.lists(st.sampled_from(IDS), max_size=12)))
        mesh.check()
        lengths_of(mesh, data.draw(st.lists(st.sampled_from(IDS), max_size=12)))
    for which in range(3):
        assert contents(mesh.blocks, mesh.held[which]).keys() == mesh.wanted[which].keys()
