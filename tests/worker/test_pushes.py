"""Blocks offered as they are completed or about to go, and the order of going that offers do not change."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.common.blocks import BlockId, split_ids
from services.worker.block_pool import BlockPool
from services.worker.mover_messages import PushBlocks, PushDone
from services.worker.pushes import Pushes
from tests.worker.test_push_memory import REQUEST, A

SIZE = 16


class Scene:
    """A pool whose chains of two blocks belong to different owners."""

    def __init__(self, max_push_blocks: int = 8) -> None:
        self.pool = BlockPool(SIZE)
        self.pushes = Pushes(self.pool, policy="on_eviction", max_push_blocks=max_push_blocks)
        self.now = 0.0

    def use(self, number: int) -> None:
        """Compute chain `number`, or use it again."""
        ids = [BlockId(bytes([number, i]) * 8) for i in range(2)]
        slots = self.pool.match(ids)
        self.pool.hold(slots)
        for block_id in ids[len(slots) :]:
            (slot,) = self.pool.allocate(1) or ()
            slots.append(self.pool.register(slot, block_id, slots[-1] if slots else None))
        request = replace(REQUEST, owner_digest=bytes([number]) * 16)
        assert self.pushes.completed(request, slots[-1], self.now) is None
        self.pool.release(slots)
        self.pushes.forget(self.pool.take_changes()[1])

    def leaving(self, after_s: float = 1.0, refused: int = -1) -> list[tuple[int, list[int]]]:
        """Owner and blocks of what is offered now, all of it taken but for what is of owner `refused`."""
        self.now += after_s
        offers = []
        for push in self.pushes.due(self.now):
            ids = split_ids(push.ids)
            assert push.starts_chain
            offers.append((push.owner_digest[0], [block_id[1] for block_id in ids]))
            assert all(block_id[0] == push.owner_digest[0] for block_id in ids)
            is_refused = push.owner_digest[0] == refused
            self.pushes.finish(PushDone(push.key, 0 if is_refused else len(ids), *A, is_refused))
        return offers


def test_nothing_is_offered_while_there_is_room() -> None:
    scene = Scene()
    scene.pushes.set_target(A, 0.0)
    for number in range(4):
        scene.use(number)
    assert scene.leaving() == []


def test_what_goes_next_is_offered_with_its_ancestors_and_once() -> None:
    scene = Scene()
    scene.pushes.set_target(A, 0.0)
    for number in range(6):
        scene.use(number)
    scene.use(0)
    assert scene.leaving() == [(1, [0, 1]), (2, [0, 1]), (3, [0, 1]), (4, [0, 1])]
    assert scene.leaving() == []
    for number in range(6, 12):
        scene.use(number)
        scene.leaving()
    assert scene.pushes.dropped == 0
    scene.pool.check()


def test_what_goes_before_it_was_offered_is_counted() -> None:
    scene = Scene()
    scene.pushes.set_target(A, 0.0)
    for number in range(12):
        scene.use(number)
    assert scene.pushes.dropped == 8


def test_without_a_node_nothing_is_offered_or_counted() -> None:
    scene = Scene()
    for number in range(12):
        scene.use(number)
    assert scene.leaving() == []
    assert scene.pushes.dropped == 0


def test_what_the_node_keeps_refusing_is_not_offered_at_every_step() -> None:
    """Blocks of a cleared tenant, say, stay in the pool until others need their place."""
    scene = Scene()
    scene.pushes.set_target(A, 0.0)
    for number in range(6):
        scene.use(number)
    assert scene.leaving(refused=1) == [(0, [0, 1]), (1, [0, 1]), (2, [0, 1]), (3, [0, 1])]
    assert scene.leaving(refused=1) == [(1, [0, 1])]
    for _ in range(40):
        assert scene.leaving(0.1, refused=1) == []
    assert scene.leaving(5.0, refused=1) == [(1, [0, 1])]
    assert scene.leaving(1.0) == []
    scene.pushes.set_target(("another", 1), scene.now)
    scene.pushes.set_target(A, scene.now)
    assert scene.leaving()[1] == (1, [0, 1])
    assert scene.leaving() == []


def test_what_is_known_of_blocks_ends_with_them() -> None:
    scene = Scene()
    scene.pushes.set_target(A, 0.0)
    for number in range(40):
        scene.use(number)
        scene.leaving(refused=number % 3)
    assert set(scene.pushes._refusals) <= set(scene.pool.held_ids())
    assert len(scene.pushes._origins) == len(list(scene.pool.held_ids())) == SIZE


class Through:
    """A pool whose blocks are offered as they are completed, at most four at a time."""

    def __init__(self, size: int = 64) -> None:
        self.pool = BlockPool(size)
        self.pushes = Pushes(self.pool, max_push_blocks=4)
        self.pushes.set_target(A, 0.0)
        self.now = 0.0
        self.under_way: list[PushBlocks] = []
        self.taken: list[BlockId] = []

    def complete(self, number: int, length: int) -> bool:
        """Compute `length` blocks of chain `number` in one step; whether there was room for them."""
        ids = [BlockId(bytes([number, i]) * 8) for i in range(length)]
        slots = self.pool.match(ids)
        self.pool.hold(slots)
        known = len(slots)
        room = self.pool.allocate(length - known)
        if room is None:
            self.pool.release(slots)
            return False
        for slot, block_id in zip(room, ids[known:], strict=True):
            slots.append(self.pool.register(slot, block_id, slots[-1] if slots else None))
        for slot in slots[known:]:
            push = self.pushes.completed(REQUEST, slot, self.now)
            self.under_way += [push] if push is not None else []
        self.pool.release(slots)
        self.pushes.forget(self.pool.take_changes()[1])
        return True

    def finish(self, accepted: int | None = None) -> list[BlockId]:
        """The end of the push that has gone on for longest, of which `accepted` blocks were taken, or all."""
        push = self.under_way.pop(0)
        ids = split_ids(push.ids)
        node = self.pushes.memory.target or A
        self.pushes.finish(PushDone(push.key, len(ids) if accepted is None else accepted, *node, accepted is not None))
        self.under_way += self.pushes.due(self.now)
        assert sum(len(push.slots) for push in self.under_way) <= 4
        self.taken += ids[:accepted]
        return ids


def test_what_found_no_room_goes_when_there_is_room_again() -> None:
    scene = Through()
    scene.complete(1, 10)
    while scene.under_way:
        scene.finish()
    assert scene.taken == [BlockId(bytes([1, i]) * 8) for i in range(10)]
    assert scene.pushes.is_idle
    scene.pool.check()


def test_a_node_that_refuses_is_not_pressed_with_what_found_no_room() -> None:
    scene = Through()
    scene.complete(1, 10)
    while len(scene.under_way) > 1:
        scene.finish()
    scene.finish(accepted=0)
    assert scene.under_way == []
    scene.now += 1.0
    scene.complete(1, 11)
    assert scene.under_way != [], "with a descendant it is offered again"


def test_what_leaves_the_pool_before_there_is_room_is_counted_and_forgotten() -> None:
    scene = Through(size=12)
    scene.complete(1, 8)
    scene.complete(2, 8)
    assert scene.pushes.dropped == 4
    while scene.under_way:
        scene.finish()
    assert {block_id[0] for block_id in scene.taken[4:]} == {2}
    assert len(scene.taken) == len(set(scene.taken)) == 12
    scene.pool.check()


def test_what_is_left_of_a_chain_whose_end_has_gone_goes_too() -> None:
    scene = Through(size=16)
    scene.complete(1, 12)
    scene.complete(2, 5)
    while scene.under_way:
        scene.finish()
    here = set(scene.pool.held_ids())
    assert BlockId(bytes([1, 11]) * 8) not in here
    assert here <= set(scene.taken)


def test_the_end_of_a_push_to_the_node_before_says_nothing_of_this_one() -> None:
    scene = Through()
    scene.complete(1, 3)
    former, scene.under_way = scene.under_way, []
    scene.pushes.set_target(("another", 1), 0.0)
    scene.complete(2, 10)
    for push in former:
        scene.pushes.finish(PushDone(push.key, 0, *A, True))
        scene.under_way += scene.pushes.due(0.0)
    while scene.under_way:
        scene.finish()
    assert [block_id for block_id in scene.taken if block_id[0] == 2] == [BlockId(bytes([2, i]) * 8) for i in range(10)]


@given(
    st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 3), st.integers(1, 9))), max_size=40),
    st.sampled_from([16, 64]),
)
def test_every_block_that_stays_is_offered_once_and_after_its_parent(
    steps: list[tuple[int, int] | None], size: int
) -> None:
    """None: a push ends."""
    scene, completed = Through(size), set()
    for step in steps:
        if step is not None:
            if not scene.complete(*step):
                continue
            completed |= {BlockId(bytes([step[0], i]) * 8) for i in range(step[1])}
        elif scene.under_way:
            scene.finish()
    while scene.under_way:
        scene.finish()
    here = set(scene.pool.held_ids())
    assert here <= set(scene.taken) <= completed
    if size == 64:
        assert len(scene.taken) == len(here)
    seen: set[BlockId] = set()
    for block_id in scene.taken:
        assert not block_id[1] or BlockId(bytes([block_id[0], block_id[1] - 1]) * 8) in seen
        seen.add(block_id)
    scene.pool.check()


@given(st.lists(st.tuples(st.sampled_from(["use", "push"]), st.integers(0, 9)), max_size=60))
def test_being_pushed_changes_nothing_about_who_goes(steps: list[tuple[str, int]]) -> None:
    """Two pools see the same uses; blocks of one are held and let go in between, as pushes do."""
    plain, pushed = BlockPool(8), BlockPool(8)
    for action, number in steps:
        ids = [BlockId(bytes([number, i]) * 8) for i in range(2)]
        if action == "push":
            slots = pushed.match(ids)
            pushed.hold(slots)
            pushed.release(slots, keep_age=True)
            continue
        for pool in (plain, pushed):
            slots = pool.match(ids)
            pool.hold(slots)
            for block_id in ids[len(slots) :]:
                (slot,) = pool.allocate(1) or ()
                slots.append(pool.register(slot, block_id, slots[-1] if slots else None))
            pool.release(slots)
            pool.check()
        assert set(plain.held_ids()) == set(pushed.held_ids())
        going = [[pool.id_of(slot) for slot in pool.next_to_go(8)] for pool in (plain, pushed)]
        assert going[0] == going[1]
