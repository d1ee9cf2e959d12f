"""Log probabilities of prompts: each told once, in order, before the output, whatever is cached, preempted or moved."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.chunk import MOST_ROWS_READ
from services.worker.core import EngineCore
from services.worker.drawing import read_rows
from services.worker.engine.batch import StepBuilder
from services.worker.engine.loop import StepRunner
from services.worker.engine.sampled import Sampled
from services.worker.messages import (
    AdmittedRequest,
    Message,
    PreparedRequest,
    PromptScored,
    Resume,
    Sampling,
    StepOutput,
)
from tests.worker.cores import known_output, make_core, submit
from tests.worker.toy import VOCAB, ToyRunner, entry, expected_tokens

BLOCKS = 64
# Of the toy's logits: 10 for one token, 0 for the others.
_SURE = 10 - math.log(math.exp(10) + VOCAB - 1)


def scored(top: int = 2, **changes: object) -> Sampling:
    return Sampling(temperature=0.0, num_prompt_logprobs=top, **changes)  # type: ignore[arg-type]


def expected_scores(prompt: list[int]) -> list[float]:
    """Of each token of the prompt but the first."""
    told, entries = [], [entry(0, prompt[0])]
    for token in prompt[1:]:
        told.append(_SURE if sum(entries) % 1_000_003 % VOCAB == token else _SURE - 10)
        entries.append(entry(entries[-1], token))
    return told


def run(core: EngineCore, runner: StepRunner, steps: int = 5000) -> list[Message]:
    said: list[Message] = []
    builder = StepBuilder()
    for _ in range(steps):
        chunks = core.schedule(0.0)
        said += core.to_front
        core.to_front.clear()
        if not chunks:
            break
        assert sum(chunk.read for chunk in chunks) <= MOST_ROWS_READ
        runner.submit(builder.build(chunks))
        core.commit(chunks, runner.draw(core.draw_rows(chunks), read_rows(chunks)), 0.01, 0.0)
    return said


def check(said: list[Message], key: int, prompt: list[int]) -> None:
    """What has been said of a request's prompt is right, whole, and before its output."""
    told: list[float] = []
    for message in said:
        if isinstance(message, PromptScored) and message.key == key:
            assert message.first == len(told) + 1
            assert message.token_ids == prompt[message.first : message.first + len(message.token_ids)]
            told += [one.logprob for one in message.logprobs]
            assert all(
                len(one.top) == 2 and one.rank == (1 if one.logprob > -1 else one.rank) for one in message.logprobs
            )
        if isinstance(message, StepOutput) and any(output.key == key for output in message.choices):
            assert len(told) == len(prompt) - 1
    assert told == pytest.approx(expected_scores(prompt), abs=1e-4)


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    choices=st.sampled_from([1, 2]),
    budget=st.sampled_from([16, 40, 300]),
    blocks=st.sampled_from([24, BLOCKS]),
)
def test_scores_are_right_beside_others_over_hits_and_preemption(
    lengths: list[int], choices: int, budget: int, blocks: int
) -> None:
    core = make_core(blocks, budget=budget, max_queue_s=1e3, speculation_tokens=4)
    runner = Sampled(ToyRunner(blocks))
    prompts = {key: [(i * 5 + key) % VOCAB for i in range(length)] for key, length in enumerate(lengths, 1)}
    for _ in range(2):  # the second time over what the first has left in the pool
        for key, prompt in prompts.items():
            sampling = scored() if key % 2 else Sampling(temperature=0.0)
            core.handle(submit(key, prompt, 20, sampling=sampling, num_choices=choices), 0.0)
        said = run(core, runner)
        for key, prompt in prompts.items():
            if key % 2:
                check(said, key, prompt)
            else:
                assert not any(isinstance(message, PromptScored) and message.key == key for message in said)
            drawn = [
                o.token_ids
                for m in said
                if isinstance(m, StepOutput)
                for o in m.choices
                if (o.key, o.choice) == (key, 0)
            ]
            assert [token for tokens in drawn for token in tokens] == expected_tokens(tuple(prompt), 20)
        assert core.is_idle
        core.pool.check()


def test_cached_blocks_are_computed_again_for_the_leader_alone() -> None:
    core, runner = make_core(BLOCKS), Sampled(ToyRunner(BLOCKS))
    prompt = list(range(64))
    core.handle(submit(1, prompt, 2), 0.0)
    run(core, runner)
    core.handle(submit(2, prompt, 2, sampling=scored(), num_choices=2), 0.0)
    said = run(core, runner)
    (admitted,) = [message for message in said if isinstance(message, AdmittedRequest)]
    assert admitted.cached_tokens == 0
    check(said, 2, prompt)
    (usage,) = [usage for message in said if isinstance(message, StepOutput) for usage in message.completed]
    assert usage.cached_local == 0


def test_a_held_attempt_tells_before_it_is_prepared_and_one_with_output_tells_nothing() -> None:
    core, runner = make_core(BLOCKS), Sampled(ToyRunner(BLOCKS))
    prompt = list(range(50))
    core.handle(submit(1, prompt, 5, sampling=scored(), hold_s=60.0), 0.0)
    said = run(core, runner)
    kinds = [type(message) for message in said if isinstance(message, PromptScored | PreparedRequest)]
    assert kinds[-1] is PreparedRequest
    assert kinds.count(PreparedRequest) == 1
    core.handle(Resume(1, []), 0.0)
    check(said + run(core, runner), 1, prompt)
    output = expected_tokens(tuple(prompt), 5)
    core.handle(submit(2, prompt, 5, sampling=scored(), known=[known_output(0, output[:2])]), 0.0)
    assert not any(isinstance(message, PromptScored) for message in run(core, runner))


def test_logits_that_are_no_numbers_end_the_request() -> None:
    class Broken(ToyRunner):
        def collect(self) -> object:  # type: ignore[override]
            return super().collect() * math.nan

    core = make_core(BLOCKS)
    core.handle(submit(1, list(range(40)), 5, sampling=scored()), 0.0)
    said = run(core, Sampled(Broken(BLOCKS)))
    assert [type(m).__name__ for m in said if type(m).__name__ in ("RequestFailed", "PromptScored")] == [
        "RequestFailed"
    ]
