"""Moving an output between workers, by random interleavings: it is what one undisturbed worker would have said."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvmesh.v1.common_pb2 import FINISH_REASON_LENGTH
from kvmesh.v1.worker_pb2 import Completed, KnownOutput, TokenChunk, WorkerChoiceFinish, WorkerGenerateResponse

from services.gateway.move import Move, Stage
from services.gateway.output_record import OutputRecord

MAX_TOKENS = 6


def drawn(choice: int, position: int) -> int:
    """What every worker draws there."""
    return 100 * choice + position


def as_it_is(message: WorkerGenerateResponse) -> WorkerGenerateResponse:
    """All of it is news, of a source that says nothing that is known."""
    return message


class Worker:
    """Draws what is left of each choice; `said` is what its reader has not had."""

    def __init__(self, num_choices: int, known: Sequence[KnownOutput]) -> None:
        self.said: deque[WorkerGenerateResponse] = deque()
        self.next = [0] * num_choices
        self.ended = [False] * num_choices
        self.is_over = False
        self.learn(known)

    def learn(self, known: Sequence[KnownOutput]) -> None:
        for one in known:
            for token_id in one.token_ids:
                assert token_id == drawn(one.choice, self.next[one.choice]), "neither lost nor twice"
                self.next[one.choice] += 1
            self.ended[one.choice] = self.ended[one.choice] or one.finished
            assert one.finished or self.next[one.choice] < MAX_TOKENS, "there is something left to draw"

    def draw(self, choice: int) -> None:
        """A token of a choice, and whatever ends with it."""
        choice %= len(self.next)
        if not self.ended[choice]:
            token_ids = [drawn(choice, self.next[choice])]
            self.said.append(WorkerGenerateResponse(tokens=TokenChunk(choice=choice, token_ids=token_ids)))
            self.next[choice] += 1
            if self.next[choice] == MAX_TOKENS:
                self.ended[choice] = True
                finish = WorkerChoiceFinish(choice=choice, reason=FINISH_REASON_LENGTH)
                self.said.append(WorkerGenerateResponse(finish=finish))
        if all(self.ended) and not self.is_over:
            self.is_over = True
            self.said.append(WorkerGenerateResponse(completed=Completed()))


class Reader:
    """What the gateway does with a move's decisions, without its waiting."""

    def __init__(self, num_choices: int) -> None:
        self.record = OutputRecord(num_choices, MAX_TOKENS, ())
        self.move = Move(self.record)
        self.source = Worker(num_choices, ())
        self.target: Worker | None = None
        self.given: list[WorkerGenerateResponse] = []
        self.is_over = False
        self.now_s = 0.0

    def read(self) -> None:
        if self.source.said and not self.is_over:
            message = self.source.said.popleft()
            if message.HasField("completed"):
                self.move.end()
                self.is_over = True
            elif self.record.note(message):
                self.given.append(message)

    def tick(self) -> None:
        self.now_s += 0.3
        if self.move.is_due(self.now_s):
            self.move.asked()

    def refuse(self) -> None:
        if self.move.stage is Stage.ASKING:
            self.move.failed(self.now_s)

    def grant(self) -> None:
        if self.move.stage is Stage.ASKING:
            self.target = Worker(len(self.source.next), self.move.started())

    def lose_target(self) -> None:
        if self.move.stage is Stage.PREPARING:
            self.target = None
            self.move.failed(self.now_s)

    def tell_more(self) -> None:
        if self.move.stage is Stage.PREPARING and self.target is not None:
            self.target.learn(self.move.prepared())

    def prepare(self, unread: Sequence[WorkerGenerateResponse] | None = None) -> None:
        if self.move.stage is not Stage.PREPARING:
            return
        switch = self.move.switch(self.source.said if unread is None else unread, as_it_is)
        target, self.target = self.target, None
        if switch is None:
            return
        assert target is not None
        self.given += switch.ready
        self.is_over = self.record.is_over
        if not self.is_over:
            target.learn(switch.further)
            self.source = target

    def lose_source(self, arrived: int) -> None:
        """Of what it said last, so many messages have still arrived."""
        for _ in range(min(arrived, len(self.source.said))):
            self.read()
        if self.is_over:
            return
        if self.move.stage is Stage.PREPARING:
            self.prepare(())
            return
        self.move.end()
        self.given += self.record.loose_ends()
        self.is_over = self.record.is_over
        if not self.is_over:
            self.source = Worker(len(self.source.next), self.record.known())


ACTIONS = (
    "draw",
    "read",
    "want",
    "tick",
    "grant",
    "tell_more",
    "prepare",
    "refuse",
    "lose_target",
    "lose_source",
    "cut",
)


@settings(max_examples=250)
@given(
    num_choices=st.integers(1, 3),
    is_planned=st.booleans(),
    steps=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 2)), min_size=15, max_size=60),
)
def test_no_token_is_lost_or_said_twice(num_choices: int, is_planned: bool, steps: list[tuple[str, int]]) -> None:
    """is_planned: a handoff, whose target begins with its source."""
    reader = Reader(num_choices)
    if is_planned:
        reader.target = Worker(num_choices, reader.move.planned(2))
    cut: set[int] = set()
    for action, pick in steps:
        choice = pick % num_choices
        if reader.is_over:
            break
        if action == "draw":
            reader.source.draw(choice)
        elif action == "want":
            reader.move.wanted(reader.now_s, 1 + pick)
            reader.tick()
        elif action == "cut":
            reader.record.end(choice)
            cut.add(choice)
        elif action == "lose_source":
            reader.lose_source(pick)
        else:
            getattr(reader, action)()
    while not reader.is_over:
        for choice in range(num_choices):
            reader.source.draw(choice)
        reader.read()
    for choice in range(num_choices):
        own = [message for message in reader.given if message.HasField("tokens") and message.tokens.choice == choice]
        token_ids = [token_id for message in own for token_id in message.tokens.token_ids]
        whole = [drawn(choice, position) for position in range(MAX_TOKENS)]
        finishes = [m for m in reader.given if m.HasField("finish") and m.finish.choice == choice]
        if choice in cut:
            assert token_ids == whole[: len(token_ids)]
            assert len(finishes) <= 1
        else:
            assert token_ids == whole
            assert len(finishes) == 1


def test_a_target_is_told_more_as_long_as_it_is_much_and_not_for_ever() -> None:
    record = OutputRecord(1, 100, ())
    move = Move(record)

    def draw(count: int) -> None:
        record.note(WorkerGenerateResponse(tokens=TokenChunk(choice=0, token_ids=range(count))))

    draw(5)
    move.wanted(0.0, 3)
    move.asked()
    assert [len(one.token_ids) for one in move.started()] == [5]
    draw(2)
    assert move.prepared() == [], "not worth another round"
    told = []
    draw(7)
    for count in (8, 7, 6, 5):
        further = move.prepared()
        told.append(len(further[0].token_ids))
        draw(count)
    assert told == [9, 8, 7, 6]
    assert move.prepared() == [], "not for ever"
    switch = move.switch((), as_it_is)
    assert switch is not None
    assert [len(one.token_ids) for one in switch.further] == [5], "each token is told once"


def test_a_source_that_says_as_much_in_every_round_is_left() -> None:
    record = OutputRecord(1, 100, ())
    move = Move(record)
    move.wanted(0.0, 3)
    move.asked()
    move.started()
    for rounds in ([4], []):
        record.note(WorkerGenerateResponse(tokens=TokenChunk(choice=0, token_ids=range(4))))
        assert [len(one.token_ids) for one in move.prepared()] == rounds


def test_tries_come_ever_later_and_end_where_they_are_not_worth_it() -> None:
    move = Move(OutputRecord(1, MAX_TOKENS, ()))
    move.wanted(0.0, 3)
    now_s, asked_at_s = 0.0, []
    while move.stage is not Stage.STAYING:
        if move.is_due(now_s):
            asked_at_s.append(round(now_s, 2))
            move.asked()
            move.failed(now_s)
        now_s += 0.01
    assert asked_at_s == [0.0, 0.25, 0.75]
    move.wanted(now_s, float("inf"))
    for _ in range(9):
        move.asked()
        move.failed(now_s)
    assert not move.is_due(now_s + 1.9)
    assert move.is_due(now_s + 2.1)


@pytest.mark.parametrize("before", [(), ("wanted",), ("wanted", "asked"), ("wanted", "asked", "started"), ("planned",)])
def test_a_worker_that_leaves_is_left_whatever_was_on_its_way(before: tuple[str, ...]) -> None:
    """The tries of a lesser wish, or of a handoff, would come to an end."""
    record = OutputRecord(1, MAX_TOKENS, ())
    record.note(WorkerGenerateResponse(tokens=TokenChunk(choice=0, token_ids=[1])))
    move = Move(record)
    arguments: dict[str, tuple[float, ...]] = {"wanted": (0.0, 1), "planned": (1,)}
    for step in before:
        getattr(move, step)(*arguments.get(step, ()))
    move.wanted(0.0, math.inf)
    move.wanted(0.0, 3)
    for number in range(1, 10):
        move.failed(float(10 * number))
        assert move.is_due(10.0 * number + 5)


def test_a_handoff_that_fails_is_tried_again_once_there_is_output() -> None:
    record = OutputRecord(1, MAX_TOKENS, ())
    move = Move(record)
    assert move.planned(2) == []
    move.failed(0.0)
    assert not move.is_due(1.0)
    record.note(WorkerGenerateResponse(tokens=TokenChunk(choice=0, token_ids=[1])))
    assert move.is_due(1.0)
    move.asked()
    move.failed(1.0)
    assert move.stage is Stage.STAYING


def test_what_has_only_its_end_left_is_not_moved() -> None:
    record = OutputRecord(1, MAX_TOKENS, ())
    move = Move(record)
    record.end(0)
    move.wanted(0.0, 3)
    assert not move.is_due(1.0)


def test_what_a_source_has_said_again_is_not_given_again() -> None:
    """One that drew beside another before may have unread tokens that the record holds, and some that overlap."""
    record = OutputRecord(1, 100, ())
    record.note(WorkerGenerateResponse(tokens=TokenChunk(choice=0, token_ids=[0, 1, 2])))
    chunks = [TokenChunk(token_ids=range(first, first + 3), position=first) for first in (0, 1, 2, 3)]
    move = Move(record)
    move.planned(1)
    switch = move.switch([WorkerGenerateResponse(tokens=chunk) for chunk in chunks], record.news)
    assert switch is not None
    assert [list(message.tokens.token_ids) for message in switch.ready] == [[3], [4], [5]]
    assert [list(one.token_ids) for one in record.known()] == [[0, 1, 2, 3, 4, 5]]
