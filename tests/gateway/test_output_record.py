"""What is known of an output: it grows by what is told, and another attempt is told all of it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from kvmesh.v1.common_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP
from kvmesh.v1.worker_pb2 import TokenChunk, WorkerChoiceFinish, WorkerGenerateResponse

from services.gateway.output_record import OutputRecord
from services.gateway.setbacks import Setbacks

STOP_TOKEN, MAX_TOKENS, CHOICES = 7, 12, 3
Step = tuple[int, list[int]]


def tokens(choice: int, token_ids: list[int]) -> WorkerGenerateResponse:
    return WorkerGenerateResponse(tokens=TokenChunk(choice=choice, token_ids=token_ids))


def finish(choice: int) -> WorkerGenerateResponse:
    return WorkerGenerateResponse(finish=WorkerChoiceFinish(choice=choice, reason=FINISH_REASON_STOP))


@settings(max_examples=200)
@given(
    steps=st.lists(st.tuples(st.integers(0, CHOICES - 1), st.lists(st.integers(0, 6), max_size=3)), max_size=12),
    marked=st.integers(0, 12),
)
def test_what_is_new_follows_what_was_known(steps: list[Step], marked: int) -> None:
    record = OutputRecord(CHOICES, MAX_TOKENS, (STOP_TOKEN,))
    expected: list[list[int]] = [[] for _ in range(CHOICES)]
    ended: set[int] = set()
    told = [list[int]() for _ in range(CHOICES)]
    mark = record.mark()
    for at, (choice, ids) in enumerate(steps):
        if at == marked:
            mark = record.mark()
            for one in record.known():
                told[one.choice].extend(one.token_ids)
        is_news = record.note(tokens(choice, ids) if ids else finish(choice))
        assert is_news == (choice not in ended)
        if is_news:
            expected[choice] += ids
            ended |= set() if ids else {choice}
    new = record.known(mark)
    if marked < len(steps):
        for one in new:
            told[one.choice].extend(one.token_ids)
        assert told == expected
    assert {one.choice: list(one.token_ids) for one in record.known()} == {
        choice: ids for choice, ids in enumerate(expected) if ids or choice in ended
    }
    spent = ended | {choice for choice, ids in enumerate(expected) if len(ids) >= MAX_TOKENS}
    assert {one.choice for one in record.known() if one.finished} == spent
    assert record.num_tokens == sum(map(len, expected))
    assert (record.num_open, record.is_over) == (CHOICES - len(spent), len(ended) == CHOICES)


def test_finishes_that_were_not_told_are_made_up_for() -> None:
    record = OutputRecord(4, MAX_TOKENS, (STOP_TOKEN,))
    record.note(tokens(0, [1, STOP_TOKEN]))
    record.note(tokens(1, [1] * MAX_TOKENS))
    record.note(tokens(2, [1]))
    ends = [(end.finish.choice, end.finish.reason) for end in record.loose_ends()]
    assert ends == [(0, FINISH_REASON_STOP), (1, FINISH_REASON_LENGTH)]
    assert record.loose_ends() == []
    assert [one.finished for one in record.known()] == [True, True, False]
    assert (list(record.first_open()), record.further_tokens()) == ([1], 0)
    record.note(tokens(3, [1, 2, 3]))
    assert (list(record.first_open()), record.further_tokens()) == ([1], 3)
    record.end(2)
    assert (list(record.first_open()), record.further_tokens()) == ([1, 2, 3], 0)


def test_a_token_makes_up_for_setbacks() -> None:
    setbacks = Setbacks()
    setbacks.failed("w0")
    setbacks.failed("w1")
    assert (setbacks.failures, setbacks.excluded) == (2, ["w0", "w1"])
    setbacks.progressed()
    assert (setbacks.failures, setbacks.excluded) == (0, [])


def test_the_wait_for_a_worker_backs_off_and_ends() -> None:
    setbacks, now_s, pauses = Setbacks(), 100.0, []
    setbacks.failed("w0")
    while (pause_s := setbacks.unserved(now_s, 30.0)) is not None:
        pauses.append(pause_s)
        now_s += pause_s
    assert now_s == 130.0
    assert pauses[:3] == [0.05, 0.1, 0.2]
    assert max(pauses) == 1.0
    assert setbacks.excluded == [], "whoever comes back may be one that failed"
