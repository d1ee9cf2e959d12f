"""What a worker believes of its kvstore node, and how it corrects it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from services.common.blocks import BlockId, split_ids
from services.worker.block_pool import BlockPool
from services.worker.link_rates import LinkRates
from services.worker.messages import HolderRun, Sampling
from services.worker.mover_messages import PullDone, PushBlocks, PushDone
from services.worker.sequence import Request, Sequence
from services.worker.transfers import TransferLimits, Transfers

A, B = ("a", 1), ("b", 1)
REQUEST = Request(
    key=1,
    request_id="r",
    prompt=np.zeros(1, np.int32),
    block_root=BlockId(b"root" * 4),
    prompt_ids=[],
    owner_digest=b"o" * 16,
    sampling=Sampling(),
    num_choices=1,
    max_tokens=1,
    stop_token_ids=frozenset(),
    pull_plan=[],
    priority=1,
    expected_local_blocks=0,
    arrival_s=0.0,
    deadline_s=100.0,
    traceparent="",
)


class Scene:
    """A pool with a chain of blocks that are all held."""

    def __init__(self, *, repush_blocks_per_s: float = 4.0, max_push_blocks: int = 100) -> None:
        self.pool = BlockPool(64)
        self.transfers = Transfers(
            TransferLimits(max_push_blocks=max_push_blocks, repush_blocks_per_s=repush_blocks_per_s),
            self.pool,
            LinkRates(1000),
        )
        self.slots: list[int] = []

    def compute(self, count: int) -> None:
        """Add blocks to the chain."""
        for slot in self.pool.allocate(count) or []:
            number = len(self.slots)
            parent = self.slots[-1] if self.slots else None
            self.slots.append(self.pool.register(slot, BlockId(bytes([number]) * 16), parent))

    def offer(self, now: float = 0.0) -> PushBlocks | None:
        """Offer the chain as its last block is completed."""
        return self.transfers.pushes.completed(REQUEST, self.slots[-1], now)

    def numbers(self, push: PushBlocks | None) -> list[int]:
        return [block_id[0] for block_id in split_ids(push.ids)] if push is not None else []

    def answer(
        self, push: PushBlocks | None, accepted: int, node: tuple[str, int] = A, *, refused: bool = False
    ) -> None:
        assert push is not None
        self.transfers.pushes.finish(PushDone(push.key, accepted, *node, refused))


def test_what_is_new_goes_once_and_at_once() -> None:
    scene = Scene()
    scene.compute(3)
    assert scene.offer() is None, "there is no target"
    scene = Scene()
    scene.transfers.pushes.set_target(A, 0.0)
    scene.compute(30)
    push = scene.offer()
    assert scene.numbers(push) == list(range(30))
    scene.answer(push, 30)
    assert scene.offer() is None
    scene.compute(1)
    assert scene.numbers(scene.offer()) == [30]


def test_a_new_target_gets_what_was_here_by_and_by_parents_first() -> None:
    scene = Scene(repush_blocks_per_s=4.0)
    scene.transfers.pushes.set_target(A, 0.0)
    scene.compute(20)
    scene.answer(scene.offer(), 20)
    scene.transfers.pushes.set_target(B, 10.0)
    scene.compute(1)
    assert scene.offer(10.0) is None, "a node that everybody turns to at once"
    assert scene.transfers.pushes.deferred == 1
    sent: list[int] = []
    for step in range(1, 60):
        push = scene.offer(10.0 + step / 10)
        sent += scene.numbers(push)
        assert len(sent) <= 4 * step / 10 + 1 + (len(sent) == 21)
        if push is not None:
            scene.answer(push, len(push.slots), B)
    assert sent == list(range(21))


def test_blocks_that_the_node_has_evicted_are_offered_again_with_their_descendant() -> None:
    scene = Scene(repush_blocks_per_s=100.0)
    scene.transfers.pushes.set_target(A, 0.0)
    scene.compute(3)
    scene.answer(scene.offer(), 3)
    scene.compute(1)
    scene.answer(scene.offer(1.0), 0, refused=True)
    scene.compute(1)
    assert scene.numbers(scene.offer(2.0)) == [0, 1, 2, 3, 4]


def test_a_push_that_failed_says_nothing_of_the_ancestors() -> None:
    scene = Scene()
    scene.transfers.pushes.set_target(A, 0.0)
    scene.compute(3)
    scene.answer(scene.offer(), 3)
    scene.compute(1)
    scene.answer(scene.offer(), 0)
    assert scene.numbers(scene.offer()) == [3]


def test_a_push_that_went_to_another_node_does_not_count() -> None:
    scene = Scene(repush_blocks_per_s=100.0)
    scene.transfers.pushes.set_target(A, 0.0)
    scene.compute(2)
    before = scene.offer()
    scene.transfers.pushes.set_target(B, 1.0)
    during = scene.offer(2.0)
    # The mover had not heard of the new target yet.
    scene.answer(during, 2, A)
    scene.answer(before, 2, A)
    assert scene.numbers(scene.offer(3.0)) == [0, 1]


def test_what_was_pulled_is_only_where_it_came_from() -> None:
    for holder, expected in (("a", [2]), ("b", [0, 1, 2])):
        scene = Scene(repush_blocks_per_s=100.0)
        scene.transfers.pushes.set_target(A, 0.0)
        ids = [BlockId(bytes([n]) * 16) for n in range(2)]
        run = HolderRun("kvstore", holder, 1, "", "", 0, 2)
        request = replace(REQUEST, prompt=np.zeros(40, np.int32), prompt_ids=ids, pull_plan=[run])
        request.sequences = [Sequence(request, 0, 1)]
        pull = scene.transfers.start_pull(request, 0, 0.0, reserve=0, block_compute_s=1.0)
        assert pull is not None
        scene.transfers.finish_pull(PullDone(1, 2, ["ram", "ram"], ""), 0.0)
        scene.slots = scene.pool.match(ids)
        scene.pool.hold(scene.slots)
        scene.compute(1)
        assert scene.numbers(scene.offer(1.0)) == expected


def test_memory_ends_with_the_pools_blocks() -> None:
    scene = Scene()
    scene.transfers.pushes.set_target(A, 0.0)
    scene.compute(64)
    scene.answer(scene.offer(), 64)
    scene.pool.take_changes()
    scene.pool.release(scene.slots)
    scene.pool.allocate(64)
    scene.transfers.pushes.forget(scene.pool.take_changes()[1])
    memory = scene.transfers.pushes.memory
    assert not memory._pushed
    assert not memory._old
