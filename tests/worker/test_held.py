"""Attempts that are prepared at one worker while another still draws, and wishes to move, on the toy model."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.messages import Abort, HolderRun, MoveRequested, PreparedRequest, Resume, StepOutput
from services.worker.mover_messages import CancelPull
from services.worker.prompt_budget import MIN_PREFILL_TOKENS
from tests.worker.cores import known_output, make_core, submit
from tests.worker.test_known_output import NUM_BLOCKS, PROMPT, Toy
from tests.worker.toy import ToyRunner, expected_tokens

HOLD = {"hold_s": 5.0}


def prepared(toy: Toy) -> list[int]:
    return [message.key for message in toy.said if isinstance(message, PreparedRequest)]


def moves(toy: Toy) -> list[tuple[int, str]]:
    return [(message.key, message.reason) for message in toy.said if isinstance(message, MoveRequested)]


@settings(max_examples=60)
@given(
    prompt=st.lists(st.integers(0, 96), min_size=1, max_size=50),
    splits=st.lists(st.tuples(st.integers(0, 39), st.integers(0, 39)), min_size=1, max_size=3),
    steps=st.integers(0, 12),
    more_steps=st.integers(0, 6),
    cache=st.booleans(),
)
def test_a_held_attempt_goes_on_after_what_came_meanwhile(
    prompt: list[int], splits: list[tuple[int, int]], steps: int, more_steps: int, cache: bool
) -> None:
    """Told more and resumed before or after it is prepared, with further output of any length."""
    toy, whole = Toy(make_core(NUM_BLOCKS, cache=cache, max_queue_s=100.0)), expected_tokens(tuple(prompt), 40)
    cuts = [sorted(split) for split in splits]
    known = [known_output(choice, whole[:first]) for choice, (first, _) in enumerate(cuts)]
    toy.tell(submit(1, prompt, 40, num_choices=len(cuts), known=known, **HOLD))
    toy.run(steps)
    assert not any(toy.tokens(1, choice) for choice in range(len(cuts)))
    more = [(first + last) // 2 for first, last in cuts]
    halves = [known_output(choice, whole[cuts[choice][0] : end]) for choice, end in enumerate(more)]
    toy.tell(Resume(1, halves, hold=True))
    toy.run(more_steps)
    assert not any(toy.tokens(1, choice) for choice in range(len(cuts)))
    further = [known_output(choice, whole[end : cuts[choice][1]]) for choice, end in enumerate(more)]
    toy.tell(Resume(1, further))
    toy.run()
    assert [toy.tokens(1, choice) for choice in range(len(cuts))] == [whole[last:] for _, last in cuts]
    usage = toy.usage(1)
    assert (usage.output_tokens, usage.known_tokens) == (40 * len(cuts), sum(last for _, last in cuts))
    assert toy.core.is_idle


@settings(max_examples=60)
@given(
    prompt=st.lists(st.integers(0, 96), min_size=1, max_size=40),
    choices=st.integers(1, 3),
    talk=st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 4), min_size=3, max_size=3)), max_size=12),
    speculation_tokens=st.sampled_from([0, 3]),
)
def test_what_another_draws_meanwhile_is_not_drawn_again(
    prompt: list[int], choices: int, talk: list[tuple[int, list[int]]], speculation_tokens: int
) -> None:
    """Resumed, it is told more between its steps: of what it has drawn itself, and of what it has not."""
    toy = Toy(make_core(NUM_BLOCKS, max_queue_s=100.0, speculation_tokens=speculation_tokens))
    whole, told = expected_tokens(tuple(prompt), 30), [0] * choices
    toy.tell(submit(1, prompt, 30, num_choices=choices, **HOLD))
    toy.run()
    toy.tell(Resume(1, []))
    for steps, counts in talk:
        toy.run(steps)
        further = []
        for choice in range(choices):
            end = min(30, told[choice] + counts[choice])
            further.append(known_output(choice, whole[told[choice] : end], finished=end == 30))
            told[choice] = end
        toy.tell(Resume(1, [one for one in further if one.token_ids]))
    toy.run()
    outputs = [o for m in toy.said if isinstance(m, StepOutput) for o in m.choices]
    for choice in range(choices):
        drawn = [(o.position, o.token_ids) for o in outputs if o.choice == choice]
        assert all(token_ids == whole[first : first + len(token_ids)] for first, token_ids in drawn)
        assert all(before + len(ids) <= after for (before, ids), (after, _) in pairwise(drawn)), "nothing twice"
    usage = toy.usage(1)
    num_drawn = sum(len(o.token_ids) for o in outputs)
    assert (usage.output_tokens, usage.known_tokens) == (30 * choices, 30 * choices - num_drawn)
    assert toy.core.is_idle


def test_prepared_is_all_but_one_token_and_said_once() -> None:
    toy, whole = Toy(), expected_tokens(tuple(PROMPT), 40)
    known = [known_output(0, whole[:11]), known_output(1, whole[:3])]
    toy.tell(submit(1, PROMPT, 40, num_choices=2, known=known, **HOLD))
    toy.run()
    assert prepared(toy) == [1]
    load = toy.core.load(toy.now)
    assert (load.running_requests, load.decoding_sequences, load.queued_prefill_tokens) == (1, 2, 0)
    # Others are served beside it.
    toy.tell(submit(2, PROMPT, 40))
    toy.run()
    assert toy.tokens(2) == whole
    toy.tell(Resume(1, [known_output(0, whole[11:15])]))
    chunks = toy.core.schedule(toy.now)
    assert sorted((chunk.sequence.choice, chunk.length, chunk.draws) for chunk in chunks) == [
        (0, 5, True),
        (1, 1, True),
    ]
    toy.run()
    assert prepared(toy) == [1]
    assert [toy.tokens(1, choice) for choice in (0, 1)] == [whole[15:], whole[3:]]


def test_what_is_told_more_is_prepared_again() -> None:
    toy, whole = Toy(), expected_tokens(tuple(PROMPT), 40)
    toy.tell(submit(1, PROMPT, 40, **HOLD))
    toy.run()
    toy.tell(Resume(1, [known_output(0, whole[:20])], hold=True))
    (chunk,) = toy.core.schedule(toy.now)
    assert (chunk.length, chunk.draws) == (20, False), "all but the last, which a draw follows"
    toy.run()
    assert prepared(toy) == [1, 1]
    toy.tell(Resume(1, [known_output(0, whole[20:21], finished=True)], hold=True))
    assert toy.usage(1).known_tokens == 21, "nothing is left to wait for"
    assert toy.core.is_idle


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 32, 33])
@pytest.mark.parametrize("choices", [1, 2])
def test_nothing_known_but_a_prompt_is_prepared_too(num_tokens: int, choices: int) -> None:
    toy, prompt = Toy(), list(range(num_tokens))
    for key in (1, 2):
        toy.tell(submit(key, prompt, 5, num_choices=choices, **HOLD))
        toy.run()
        assert prepared(toy) == list(range(1, key + 1))
        toy.tell(Resume(key, []))
        toy.run()
        assert [toy.tokens(key, choice) for choice in range(choices)] == [expected_tokens(tuple(prompt), 5)] * choices


def test_further_output_may_end_choices() -> None:
    toy, whole = Toy(), expected_tokens(tuple(PROMPT), 20)
    toy.tell(submit(1, PROMPT, 20, num_choices=2, **HOLD))
    toy.tell(Resume(1, [known_output(0, whole[:4], finished=True)]))
    toy.run()
    assert [toy.tokens(1, 0), toy.tokens(1, 1)] == [[], whole]
    assert toy.usage(1).output_tokens == 24
    toy.tell(submit(2, PROMPT, 20, pull_plan=[HolderRun("worker", "w", 1, "a", "b", 0, 1)], **HOLD))
    toy.tell(submit(3, [9] * 40, 20, pull_plan=[HolderRun("worker", "w", 1, "a", "b", 0, 2)], **HOLD))
    for key in (2, 3):
        toy.tell(Resume(key, [known_output(0, [5], finished=True)]))
        assert toy.usage(key).known_tokens == 1, "at once, pulling or not"
    assert [message.key for message in toy.core.to_mover if isinstance(message, CancelPull)] == [3]
    toy.run()
    assert not toy.core.scheduler.requests


@pytest.mark.parametrize("further", [[known_output(1, [1])], [known_output(0, [1] * 7)], [known_output(0, [99])]])
def test_further_output_that_cannot_be_ends_the_attempt(further: list[Any]) -> None:
    toy = Toy()
    toy.tell(submit(1, PROMPT, 10, known=[known_output(0, [1, 2, 3])], **HOLD))
    toy.run(1)
    toy.tell(Resume(1, further))
    assert toy.code(1) == "INVALID_ARGUMENT"
    assert toy.core.is_idle


def test_an_attempt_is_resumed_once() -> None:
    toy = Toy()
    toy.tell(Resume(1, []))
    toy.tell(submit(1, PROMPT, 10))
    toy.tell(Resume(1, []))
    assert toy.code(1) == "INVALID_ARGUMENT"
    toy.tell(submit(2, PROMPT, 10, num_choices=6, **HOLD))
    assert toy.code(2) == "INVALID_ARGUMENT", "more choices than places"
    assert toy.core.is_idle


def test_a_held_attempt_that_nobody_resumes_ends() -> None:
    toy = Toy()
    for key in (1, 2, 3):
        toy.tell(submit(key, PROMPT, 10, **HOLD))
    toy.run()
    toy.tell(Resume(2, []))
    toy.tell(Abort(3))
    toy.core.expire(5.1)
    toy.run()
    assert toy.code(1) == "ABORTED"
    assert toy.tokens(2) == expected_tokens(tuple(PROMPT), 10)
    assert toy.core.is_idle
    assert toy.core.pool.statistics.referenced == 0


def test_what_came_later_is_preempted_before_a_held_attempt() -> None:
    toy = Toy(make_core(12, max_queue_s=100.0), ToyRunner(12))
    toy.tell(submit(1, PROMPT, 100, **HOLD))
    toy.run()
    toy.tell(submit(2, [7] * 20, 150))
    toy.tell(submit(3, [8] * 20, 150))
    toy.run()
    (held,) = toy.core.scheduler.requests[1].sequences
    assert held.has_slots
    assert toy.core.scheduler.preemptions > 0
    assert moves(toy)[0] == (3, "short_of_blocks")
    assert 1 not in dict(moves(toy))
    toy.tell(Resume(1, []))
    toy.run()
    assert toy.tokens(1) == expected_tokens(tuple(PROMPT), 100)
    assert toy.tokens(2) == expected_tokens((7,) * 20, 150)
    assert toy.tokens(3) == expected_tokens((8,) * 20, 150)
    assert len(dict(moves(toy))) == len(moves(toy)), "each is asked once"


def test_the_last_is_asked_to_move_before_it_is_preempted() -> None:
    toy = Toy(make_core(20, max_queue_s=100.0), ToyRunner(20))
    for key in (1, 2, 3):
        toy.tell(submit(key, [key] * 10, 200))
    while not moves(toy):
        toy.run(1)
    assert toy.core.scheduler.preemptions == 0
    assert moves(toy) == [(3, "short_of_blocks")]
    toy.tell(Abort(3))
    while len(moves(toy)) == 1:
        toy.run(1)
    assert toy.core.scheduler.preemptions == 0
    assert moves(toy)[1:] == [(2, "short_of_blocks")]
    toy.tell(Abort(2))
    toy.run()
    assert len(moves(toy)) == 2, "the last one need not go"
    assert toy.tokens(1) == expected_tokens((1,) * 10, 200)


def test_the_last_less_urgent_attempt_is_asked_to_make_room_once() -> None:
    toy = Toy(make_core(NUM_BLOCKS, max_running=3, max_queue_s=100.0))
    for key, priority in ((1, 2), (2, 3), (3, 3)):
        toy.tell(submit(key, [key] * 10, 60, priority=priority))
    toy.run(3)
    toy.tell(submit(4, [4] * 10, 5, priority=2))
    toy.run(3)
    assert moves(toy) == [(3, "priority")]
    toy.tell(Abort(3))
    toy.run(8)
    assert toy.usage(4).output_tokens == 5
    toy.tell(submit(5, [5] * 10, 5, priority=3))
    toy.tell(submit(6, [6] * 10, 5, priority=3))
    toy.run(2)
    assert moves(toy) == [(3, "priority")], "nobody is less urgent than those that wait"
    toy.tell(submit(7, [7] * 10, 5, priority=1))
    toy.run(2)
    assert moves(toy)[1:] == [(5, "priority")]


def test_whose_blocks_are_enough_is_asked_to_make_room_for_a_long_prompt() -> None:
    """The one that frees no more than is lacking; nobody else while it is on its way."""
    toy = Toy(make_core(28, budget=400, max_queue_s=100.0), ToyRunner(28))
    for key, length in ((1, 90), (2, 150), (3, 20)):
        toy.tell(submit(key, [key] * length, 30))
    toy.run(2)
    toy.tell(submit(4, [4] * 230, 5))
    toy.tell(submit(5, [5] * 10, 5))
    toy.run(2)
    # Of 28 blocks 10 are free; 15 and a reserve of 3 are wanted, the third has 2, the first 6, the second 10.
    assert moves(toy) == [(2, "defragmentation")]
    toy.tell(Abort(2))
    toy.run(6)
    assert toy.usage(4).output_tokens == 5
    assert [reason for _, reason in moves(toy)].count("defragmentation") == 1


@settings(max_examples=60)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30), st.integers(1, 3)), min_size=1, max_size=4),
    steps=st.integers(1, 30),
    gone=st.integers(0, 3),
)
def test_what_somebody_would_free_is_what_it_frees(lengths: list[tuple[int, int, int]], steps: int, gone: int) -> None:
    """With prefixes that others have, too, and choices that share their prompt."""
    toy = Toy(make_core(NUM_BLOCKS, max_queue_s=100.0))
    for key, (shared, own, choices) in enumerate(lengths):
        toy.tell(submit(key, [1] * shared + [2 + key] * own, 40, num_choices=choices))
    toy.run(steps)
    slots = [
        slot
        for request in toy.core.scheduler.requests.values()
        if request.key == gone
        for sequence in request.sequences
        for slot in sequence.slots
    ]
    before, freed = toy.core.pool.num_available, toy.core.pool.count_freed(slots)
    toy.tell(Abort(gone))
    assert toy.core.pool.num_available - before == freed


def test_where_nobody_is_enough_those_with_the_most_blocks_go_one_after_another() -> None:
    toy = Toy(make_core(28, budget=400, max_queue_s=100.0), ToyRunner(28))
    for key, length in ((1, 110), (2, 120), (3, 60)):
        toy.tell(submit(key, [key] * length, 30))
    toy.run(2)
    toy.tell(submit(4, [4] * 240, 5))
    toy.run(2)
    assert moves(toy) == [(2, "defragmentation")]
    toy.tell(Abort(2))
    toy.run(2)
    assert moves(toy)[1:] == [(3, "defragmentation")], "its five are enough now"
    toy.tell(Abort(3))
    toy.run(8)
    assert toy.usage(4).output_tokens == 5
    toy.run()
    assert len(moves(toy)) == 2


def test_less_urgent_attempts_go_one_after_another_until_there_are_blocks_and_then_peers() -> None:
    toy = Toy(make_core(28, budget=400, max_queue_s=100.0), ToyRunner(28))
    for key, length, priority in ((1, 190, 1), (2, 90, 2), (3, 20, 2), (4, 20, 2)):
        toy.tell(submit(key, [key] * length, 30, priority=priority))
    toy.run(2)
    toy.tell(submit(5, [5] * 240, 5, priority=1))
    toy.run(2)
    for gone, further in ((4, 3), (3, 2), (2, 1)):
        assert moves(toy)[-1][0] == gone, "one at a time"
        toy.tell(Abort(gone))
        toy.run(2)
        assert moves(toy)[-1] == (further, "priority" if further > 1 else "defragmentation")
    toy.tell(Abort(1))
    toy.run(8)
    assert toy.usage(5).output_tokens == 5
    assert len(moves(toy)) == 4


def test_nobody_goes_for_a_long_prompt_that_is_less_urgent() -> None:
    toy = Toy(make_core(28, budget=400, max_queue_s=100.0), ToyRunner(28))
    for key, length in ((1, 90), (2, 150)):
        toy.tell(submit(key, [key] * length, 30, priority=1))
    toy.run(2)
    toy.tell(submit(3, [3] * 230, 5, priority=3))
    toy.run()
    assert moves(toy) == []
    assert toy.usage(3).output_tokens == 5


def test_nobody_goes_for_want_of_a_place_that_another_of_the_same_class_has() -> None:
    toy = Toy(make_core(NUM_BLOCKS, max_running=2, max_queue_s=100.0))
    for key in (1, 2, 3):
        toy.tell(submit(key, [key] * 10, 30))
    toy.run()
    assert moves(toy) == []
    assert toy.usage(3).output_tokens == 30


def test_who_goes_on_here_comes_before_prompts_and_is_not_held_up_by_them() -> None:
    """A client waits for the step that computes what another worker has said last."""
    toy, whole = Toy(make_core(NUM_BLOCKS, budget=100, max_queue_s=100.0)), expected_tokens(tuple(PROMPT), 40)
    others = [[5] * 90, [6] * 90]
    toy.tell(submit(1, others[0], 5))
    toy.tell(submit(2, PROMPT, 40, known=[known_output(0, whole[:5])], **HOLD))
    toy.run()
    toy.tell(submit(3, others[1], 5))
    toy.tell(Resume(2, [known_output(0, whole[5:8])]))
    first, second = toy.core.schedule(toy.now)
    assert (first.sequence.request.key, first.length, first.draws) == (2, 4, True)
    assert (second.sequence.request.key, second.length) == (3, MIN_PREFILL_TOKENS)
    toy.run()
    assert toy.tokens(2) == whole[8:]
    assert toy.tokens(3) == expected_tokens(tuple(others[1]), 5)


def test_what_is_told_more_is_not_behind_prompts_either() -> None:
    toy, whole = Toy(make_core(NUM_BLOCKS, budget=64, max_queue_s=100.0)), expected_tokens(tuple(PROMPT), 40)
    toy.tell(submit(1, PROMPT, 40, **HOLD))
    toy.run()
    toy.tell(submit(2, [5] * 90, 5))
    toy.tell(Resume(1, [known_output(0, whole[:9])], hold=True))
    first, second = toy.core.schedule(toy.now)
    assert (first.sequence.request.key, first.length, first.draws) == (1, 9, False)
    assert (second.sequence.request.key, second.length) == (2, 64), "nobody's client waits"
