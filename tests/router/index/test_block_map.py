"""Lookups by jumps against the walk over every block, and what is left behind when sets come and go."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.announcements import Tier
from services.common.blocks import BlockId
from services.router.index.block_map import BlockMap, HeldSet
from services.router.index.holder_sets import slots_of
from tests.router.index.contents import contents

LENGTH = 40
CHAIN = [BlockId(bytes([at * 7 % 256, at]) + bytes(14)) for at in range(LENGTH)]


def filled(sets: list[set[int]]) -> tuple[BlockMap, list[HeldSet]]:
    """A map in which each set holds the blocks of CHAIN at these places."""
    blocks, held = BlockMap(), []
    for places in sets:
        one = blocks.new_set()
        blocks.show(one)
        blocks.add(one, [(CHAIN[at], Tier.HBM) for at in sorted(places)])
        held.append(one)
    return blocks, held


def first_gap(places: set[int], length: int) -> int:
    return next((at for at in range(length) if at not in places), length)


@settings(max_examples=300)
@given(st.lists(st.integers(0, LENGTH), max_size=20), st.integers(0, LENGTH))
def test_jumps_find_what_the_walk_finds(depths: list[int], length: int) -> None:
    blocks, held = filled([set(range(depth)) for depth in depths])
    lengths = blocks.find(CHAIN[:length]).lengths(blocks.num_slots)
    assert [lengths[one.slot] for one in held] == [min(depth, length) for depth in depths]


@settings(max_examples=300)
@given(st.lists(st.sets(st.integers(0, LENGTH - 1)), max_size=8), st.integers(0, LENGTH))
def test_of_a_set_with_gaps_a_place_is_found_where_it_ends(sets: list[set[int]], length: int) -> None:
    blocks, held = filled(sets)
    lengths = blocks.find(CHAIN[:length]).lengths(blocks.num_slots)
    for one, places in zip(held, sets, strict=True):
        end = int(lengths[one.slot])
        assert end >= first_gap(places, length)
        assert end == 0 or end - 1 in places
        assert end == length or end not in places


@settings(max_examples=200)
@given(st.data())
def test_removing_and_retiring_in_any_order_leaves_what_the_others_hold(data: st.DataObject) -> None:
    blocks = BlockMap()
    wanted: dict[int, dict[BlockId, int]] = {}
    held: dict[int, HeldSet] = {}
    for number in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["new", "add", "add", "remove", "retire", "sweep"]))
        if action == "new" or not held:
            held[number], wanted[number] = blocks.new_set(), {}
            blocks.show(held[number])
            continue
        which = data.draw(st.sampled_from(sorted(held)))
        ids = data.draw(st.lists(st.sampled_from(CHAIN), max_size=12))
        if action == "add":
            tier = data.draw(st.sampled_from([Tier.HBM, Tier.SSD]))
            blocks.add(held[which], [(id_, tier) for id_ in ids])
            wanted[which].update(dict.fromkeys(ids, tier))
        elif action == "remove":
            blocks.remove(held[which], ids)
            for id_ in ids:
                wanted[which].pop(id_, None)
        elif action == "retire":
            blocks.retire(held.pop(which))
            del wanted[which]
        else:
            for _ in range(data.draw(st.integers(1, 300))):
                blocks.sweep()
    for which, one in held.items():
        assert contents(blocks, one) == wanted[which]
        assert one.count == len(wanted[which])
    while blocks.sweep():
        pass
    assert len(blocks) == len({id_ for ids in wanted.values() for id_ in ids})
    for which, one in held.items():
        assert contents(blocks, one) == wanted[which]
        blocks.retire(one)
    while blocks.sweep():
        pass
    assert (len(blocks), blocks.num_holder_sets) == (0, 0)
    assert sorted(blocks._free_slots) == list(range(blocks.num_slots))


def test_slots_are_used_again() -> None:
    blocks = BlockMap()
    for _ in range(20):
        one = blocks.new_set()
        blocks.show(one)
        blocks.add(one, [(id_, Tier.SSD) for id_ in CHAIN])
        blocks.retire(one)
        while blocks.sweep():
            pass
    assert blocks.num_slots == 2


class CountedIds(list[BlockId]):
    """A prompt that counts how many of its blocks are looked at."""

    looked_at = 0

    def __getitem__(self, at: int) -> BlockId:  # type: ignore[override]
        self.looked_at += 1
        return super().__getitem__(at)


def test_a_lookup_looks_at_few_blocks_of_a_long_prompt_and_at_none_twice() -> None:
    chain = [BlockId(random.Random(at).randbytes(16)) for at in range(4096)]
    blocks = BlockMap()
    for depth in (100, 1000, 4096):
        one = blocks.new_set()
        blocks.show(one)
        blocks.add(one, [(id_, Tier.HBM) for id_ in chain[:depth]])
    prompt = CountedIds(chain)
    assert [length for length, _ in blocks.find(prompt).runs] == [100, 1000, 4096]
    assert prompt.looked_at < 60
    for depth in range(64):
        one = blocks.new_set()
        blocks.show(one)
        blocks.add(one, [(id_, Tier.HBM) for id_ in chain[:depth]])
    short = CountedIds(chain[:64])
    blocks.find(short)
    assert short.looked_at <= 2 * len(short)


def test_slots_of_a_mask_are_those_of_its_bits() -> None:
    for slots in ([], [0], [3, 4000], list(range(0, 900, 7))):
        assert sorted(slots_of(sum(1 << slot for slot in slots))) == slots
