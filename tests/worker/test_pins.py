"""Pins of remote pullers, waiting ones among them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.common.blocks import BlockId, join_ids
from services.worker.block_pool import BlockPool
from services.worker.mover_messages import PinBlocks, PinnedSlots
from services.worker.pins import Pins

IDS = [BlockId(bytes([number]) * 16) for number in range(8)]


class Scene:
    """A pool in which one sequence computes a chain of eight blocks."""

    def __init__(self, max_blocks: int = 100) -> None:
        self.pool = BlockPool(16)
        self.pins = Pins(self.pool, max_blocks)
        self.slots: list[int] = []
        self.is_computing = True

    def compute(self) -> None:
        """The next block of the chain."""
        (slot,) = self.pool.allocate(1) or [-1]
        number = len(self.slots)
        parent = self.slots[-1] if self.slots else None
        self.slots.append(self.pool.register(slot, IDS[number], parent))

    def pin(self, key: int, first: int, *, may_wait: bool = True) -> PinnedSlots | None:
        return self.pins.pin(PinBlocks(key, join_ids(IDS[first:]), may_wait), lambda _: self.is_computing)


def test_a_waiting_pin_is_answered_with_what_has_come() -> None:
    scene = Scene()
    assert scene.pin(1, 0) is None
    assert scene.pins.settle() == []
    scene.compute()
    scene.compute()
    assert scene.pins.settle() == [PinnedSlots(1, scene.slots)]
    assert scene.pins.settle() == []
    scene.pins.unpin(1)
    assert scene.pins.is_idle


def test_a_pin_that_may_not_wait_is_answered_at_once() -> None:
    scene = Scene()
    assert scene.pin(1, 0, may_wait=False) == PinnedSlots(1, [])
    scene.is_computing = False
    assert scene.pin(2, 0) == PinnedSlots(2, [])
    assert scene.pins.is_idle


def test_nobody_waits_for_what_nobody_computes() -> None:
    scene = Scene()
    scene.compute()
    assert scene.pin(1, 1) is None
    assert scene.pin(2, 2) is None
    assert scene.pins.awaited == {IDS[1], IDS[2]}
    assert scene.pins.give_up({IDS[1]}) == [PinnedSlots(1, [])]
    scene.pins.unpin(2)
    assert scene.pins.is_idle


def test_the_bound_makes_pins_wait_for_others_to_end() -> None:
    scene = Scene(max_blocks=2)
    for _ in range(4):
        scene.compute()
    assert scene.pin(1, 0) == PinnedSlots(1, scene.slots[:2])
    assert scene.pin(2, 2) is None
    scene.pins.unpin(1)
    assert scene.pins.settle() == [PinnedSlots(2, scene.slots[2:4])]


@given(st.lists(st.tuples(st.sampled_from("pcugs"), st.integers(0, 7), st.booleans()), max_size=60))
def test_every_pin_is_answered_once_or_taken_back(actions: list[tuple[str, int, bool]]) -> None:
    scene, keys = Scene(max_blocks=5), iter(range(1000))
    unanswered: set[int] = set()
    held: set[int] = set()

    def take(answers: list[PinnedSlots]) -> None:
        for answer in answers:
            assert answer.key in unanswered
            unanswered.discard(answer.key)
            if answer.slots:
                held.add(answer.key)

    for action, number, may_wait in actions:
        if action == "p":
            key = next(keys)
            unanswered.add(key)
            answer = scene.pin(key, number, may_wait=may_wait)
            assert answer is not None or may_wait
            take([] if answer is None else [answer])
        elif action == "c" and len(scene.slots) < len(IDS):
            scene.compute()
        elif action == "s":
            take(scene.pins.settle())
        elif action == "g":
            take(scene.pins.give_up({IDS[number]}))
        elif action == "u" and held | unanswered:
            key = sorted(held | unanswered)[number % len(held | unanswered)]
            held.discard(key)
            unanswered.discard(key)
            scene.pins.unpin(key)
        scene.pool.check()
        assert scene.pins.is_idle == (not held and not unanswered)
    for key in held | unanswered:
        scene.pins.unpin(key)
    scene.pool.release(scene.slots)
    scene.pool.check()
    assert scene.pool.statistics.referenced == 0
