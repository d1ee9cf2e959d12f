"""Slots of the arena: sizes that peers choose leave nothing behind."""

from __future__ import annotations

import itertools
import random

from services.kvstore.arena import Arena, Slot


def test_slots_never_overlap_and_all_memory_comes_back() -> None:
    """Random sizes and orders against a list of what is taken."""
    rng = random.Random(5)
    arena = Arena(2**20)
    sizes = [1000, 4096, 5000, arena.slab_bytes // 2 + 1, arena.slab_bytes]
    for _ in range(20):
        taken: list[Slot] = []
        for _ in range(300):
            if taken and rng.random() < 0.45:
                arena.free(taken.pop(rng.randrange(len(taken))))
            elif (slot := arena.allocate(rng.choice(sizes))) is not None:
                taken.append(slot)
        taken.sort(key=lambda slot: slot.offset)
        assert all(a.offset + a.num_bytes <= b.offset for a, b in itertools.pairwise(taken))
        assert all(arena.slab_bytes * one.slab <= one.offset for one in taken)
        assert all(one.offset + one.num_bytes <= arena.slab_bytes * (one.slab + 1) for one in taken)
        for slot in taken:
            arena.free(slot)
        whole = [arena.allocate(arena.slab_bytes) for _ in range(arena.capacity_bytes // arena.slab_bytes)]
        assert None not in whole
        for one in whole:
            assert one is not None
            arena.free(one)


def test_sizes_that_nobody_uses_any_more_are_forgotten() -> None:
    arena = Arena(2**20)
    for num_bytes in range(1, 2000):
        slot = arena.allocate(num_bytes)
        assert slot is not None
        arena.free(slot)
    full = [arena.allocate(arena.slab_bytes) for _ in range(arena.capacity_bytes // arena.slab_bytes)]
    assert arena.allocate(77) is None
    assert None not in full
    assert arena._with_room == {}
