"""Steps and parts of blocks over one link: any order, sockets that take little, peers that go or say nothing."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine_messages import FromFrontToEngine
from services.worker.errors import RankLost
from services.worker.ipc import Link
from services.worker.model.step import StepInput
from services.worker.parallel import step_link
from services.worker.parallel.block_parts import as_bytes
from services.worker.parallel.rank import RankLoop
from services.worker.parallel.step_frames import scatter_frame
from services.worker.parallel.step_link import PartsCopy, RankLink, StepLink
from tests.worker.model.steps import Chunk, make_step

SLOTS, TIMEOUT_S = 8, 60.0
# Above what a socket holds.
PART = 96 * 1024
STEP = make_step([Chunk([1, 2, 3], 0, [0])])


@dataclass
class Runner:
    """Counts steps; its pool is the rank's."""

    pool: torch.Tensor
    num_steps: int = 0

    def submit(self, step: object) -> None:
        self.num_steps += 1

    def collect(self) -> torch.Tensor:
        return torch.empty(0)

    @property
    def decoder(self) -> Runner:
        return self

    @property
    def spec(self) -> SimpleNamespace:
        return SimpleNamespace(num_blocks=len(self.pool))


@contextmanager
def rank(runner: Runner, timeout_s: float = TIMEOUT_S) -> Iterator[StepLink]:
    """Rank 0's end of a link to a rank, a thread, that ends as the link closes."""
    here, there = socket.socketpair()
    front, front_there = socket.socketpair()
    for sock in (here, there):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    link: Link[Any] = Link(front_there, FromFrontToEngine)
    loop = RankLoop(cast(Any, runner), cast(Any, SimpleNamespace(is_last=False)), RankLink(there, timeout_s), link)

    def run() -> None:
        with suppress(RankLost, ConnectionError), there, front_there:
            loop.run()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield StepLink(here, timeout_s)
    finally:
        here.close()
        front.close()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def parts(value: int, count: int = 1) -> torch.Tensor:
    return torch.full((count, PART), value, dtype=torch.uint8)


def gather(link: StepLink, slots: list[int], into: torch.Tensor, taken: list[int] | None = None) -> PartsCopy:
    return link.gather(slots, as_bytes(into).data, lambda: (taken if taken is not None else []).append(slots[0]))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("scatter"), st.integers(0, SLOTS - 1), st.integers(0, 255)),
            st.tuples(st.just("gather"), st.integers(0, SLOTS - 1), st.just(0)),
            st.tuples(st.just("step"), st.just(0), st.just(0)),
        ),
        max_size=20,
    )
)
@settings(max_examples=25, deadline=None)
def test_everything_happens_in_the_order_in_which_it_is_asked(asked: list[tuple[str, int, int]]) -> None:
    expected = [0] * SLOTS
    runner = Runner(parts(0, SLOTS))
    with rank(runner) as link:
        gathered, copies, num_steps = [], [], 0
        for kind, slot, value in asked:
            if kind == "scatter":
                copies.append(link.scatter([slot], as_bytes(parts(value)).data))
                expected[slot] = value
            elif kind == "gather":
                gathered.append((torch.empty(1, PART, dtype=torch.uint8), expected[slot]))
                copies.append(gather(link, [slot], gathered[-1][0]))
            else:
                link.settle()
                link.send(STEP)
                link.wait_done()
                num_steps += 1
        link.settle()
        assert all(copy.is_done() for copy in copies)
        assert all((found == value).all() for found, value in gathered)
        assert runner.num_steps == num_steps


def test_a_copy_ends_while_nobody_waits_for_it() -> None:
    taken: list[int] = []
    with rank(Runner(parts(7, SLOTS))) as link:
        into = torch.empty(SLOTS, PART, dtype=torch.uint8)
        copy = gather(link, list(range(SLOTS)), into, taken)
        while not copy.is_done():
            link.poll(TIMEOUT_S)
        assert (into == 7).all()
        assert taken == [0]


def test_a_step_leaves_whole_though_the_socket_was_full() -> None:
    """Rank 0 computes its own part then, and sends nothing meanwhile."""
    here, there = socket.socketpair()
    with here, there:
        link, filled = StepLink(here, TIMEOUT_S), 0
        with suppress(BlockingIOError):
            while True:
                filled += here.send(bytes(1024))
        sending = threading.Thread(target=link.send, args=(STEP,))
        sending.start()
        while not link.has_unsent and sending.is_alive():
            time.sleep(0.001)
        assert link.has_unsent
        while filled:
            filled -= len(there.recv(min(filled, 65536)))
        received = RankLink(there, TIMEOUT_S).receive()
        sending.join(TIMEOUT_S)
        assert isinstance(received, StepInput)
        assert received.token_ids.tolist() == STEP.token_ids.tolist()


def test_parts_travel_in_frames_between_which_the_rank_says_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_link, "FRAME_BYTES", 3 * PART)
    frames: list[int] = []
    taken: list[int] = []
    runner = Runner(parts(0, SLOTS))

    class Counting(RankLoop):
        def _put(self, slots: torch.Tensor, parts: Any) -> None:
            frames.append(len(slots))
            super()._put(slots, parts)

    monkeypatch.setattr(sys.modules[__name__], "RankLoop", Counting)
    given = torch.arange(SLOTS, dtype=torch.uint8).repeat_interleave(PART).view(SLOTS, PART)
    with rank(runner) as link:
        into, order = torch.empty(SLOTS, PART, dtype=torch.uint8), list(reversed(range(SLOTS)))
        put = link.scatter(order, as_bytes(given).data)
        come = gather(link, order, into, taken)
        link.settle()
        assert put.is_done()
        assert come.is_done()
    assert frames == [3, 3, 2]
    assert taken == [SLOTS - 1], "once, when all have come"
    assert torch.equal(runner.pool, given.flip(0))
    assert torch.equal(into, given)


def test_a_rank_that_goes_is_lost_at_once() -> None:
    here, there = socket.socketpair()
    with here:
        link = StepLink(here, TIMEOUT_S)
        copy = gather(link, [0], torch.empty(1, PART, dtype=torch.uint8))
        there.close()
        with pytest.raises(RankLost, match="another rank"):
            link.settle()
        with pytest.raises(RankLost, match="another rank"):
            copy.is_done()


def test_a_rank_that_says_nothing_is_lost_in_time() -> None:
    here, there = socket.socketpair()
    with here, there:
        # It takes what fits its socket, and says nothing.
        link = StepLink(here, 1.0)
        link.send(STEP)
        with pytest.raises(RankLost, match="does not finish its step: timed out"):
            link.wait_done()
        gather(link, [0], torch.empty(1, PART, dtype=torch.uint8))
        with pytest.raises(RankLost, match="does not exchange its parts"):
            link.settle()


def test_a_rank_out_of_step_is_lost() -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b"\2")
        with pytest.raises(RankLost, match="out of step"):
            StepLink(here, TIMEOUT_S).poll(TIMEOUT_S)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (scatter_frame([SLOTS], PART) + bytes(PART), "slots beyond 8"),
        (scatter_frame([0], 4) + bytes(4), "4 bytes for 1 parts"),
        (np.array([9], np.int32).tobytes(), "frames of kind 9"),
        (np.array([1, -1, 0], np.int32).tobytes(), "an array of -4 bytes"),
    ],
)
def test_what_cannot_be_ends_the_rank(frame: bytes, message: str) -> None:
    here, there = socket.socketpair()
    front, front_there = socket.socketpair()
    with here, there, front, front_there:
        here.sendall(frame)
        steps, link = RankLink(there, TIMEOUT_S), Link(front_there, FromFrontToEngine)
        runner = cast(Any, Runner(parts(0, SLOTS)))
        with pytest.raises(RankLost, match=message):
            RankLoop(runner, cast(Any, SimpleNamespace(is_last=False)), steps, link).run()
