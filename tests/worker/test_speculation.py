"""Drafted tokens change how many steps an answer takes and nothing of the answer, whatever it was asked with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.time_model import TimeModel
from services.worker.core import EngineCore
from services.worker.engine.batch import StepBuilder
from services.worker.engine.loop import StepRunner
from services.worker.engine.sampled import Sampled
from services.worker.engine.sim_runner import SimRunner
from services.worker.engine_messages import BlockChanges
from services.worker.messages import ChoiceOutput, RequestUsage, Sampling, StepOutput, Submit
from tests.worker.cores import make_core, submit
from tests.worker.toy import VOCAB, ToyRunner

BLOCKS = 128


@dataclass
class Run:
    """What a core has said, and in how many steps."""

    outputs: dict[tuple[int, int], ChoiceOutput] = field(default_factory=dict)
    usages: dict[int, RequestUsage] = field(default_factory=dict)
    added: bytes = b""
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def hear(self, core: EngineCore) -> None:
        for message in core.to_front:
            if isinstance(message, BlockChanges):
                self.added += message.adds
            if isinstance(message, StepOutput):
                for output in message.choices:
                    self._hear_output(output)
                self.usages |= {usage.key: without_times(usage) for usage in message.completed}
        core.to_front.clear()
        self.drafted, self.accepted = core.scheduler.speculation.drafted, core.scheduler.speculation.accepted

    def _hear_output(self, output: ChoiceOutput) -> None:
        before = self.outputs.get((output.key, output.choice))
        if before is not None:
            assert not before.finish, "nothing follows an end"
            tokens, logprobs = before.token_ids + output.token_ids, before.logprobs + output.logprobs
            output = ChoiceOutput(output.key, output.choice, tokens, logprobs, output.finish)
        self.outputs[output.key, output.choice] = output

    @property
    def said(self) -> tuple[object, ...]:
        """All that does not depend on time and on the order of requests."""
        blocks = sorted(self.added[i : i + 16] for i in range(0, len(self.added), 16))
        return self.outputs, self.usages, blocks


def without_times(usage: RequestUsage) -> RequestUsage:
    return RequestUsage(usage.key, usage.prompt_tokens, usage.output_tokens, usage.cached_local, 0, 0, 0, 0, 0, 0)


def serve(core: EngineCore, runner: StepRunner, requests: Sequence[Submit]) -> Run:
    run, builder = Run(), StepBuilder()
    for request in requests:
        core.handle(request, 0.0)
    while chunks := core.schedule(0.0):
        runner.submit(builder.build(chunks))
        core.commit(chunks, runner.draw(core.draw_rows(chunks)), 0.01, 0.0)
        run.steps += 1
        run.hear(core)
    assert core.is_idle
    core.pool.check()
    assert core.pool.statistics.referenced == 0
    return run


_samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.0, 1.0, 4.0]),
    top_p=st.sampled_from([1.0, 0.9]),
    top_k=st.sampled_from([0, 5]),
    min_p=st.sampled_from([0.0, 0.01]),
    seed=st.integers(0, 5),
    presence_penalty=st.sampled_from([0.0, 0.0, 3.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    logit_bias=st.sampled_from([{}, {}, {1: 8.0}]),
    num_logprobs=st.sampled_from([None, None, 0, 3]),
)


@st.composite
def requests(draw: st.DrawFn) -> list[Submit]:
    made = []
    for key in range(1, draw(st.integers(1, 4)) + 1):
        made.append(
            submit(
                key,
                draw(st.lists(st.integers(0, 2), min_size=1, max_size=60)),
                draw(st.integers(1, 60)),
                sampling=draw(_samplings),
                num_choices=draw(st.sampled_from([1, 1, 2])),
                stop_token_ids=draw(st.sampled_from([[], [], [2], [50]])),
            )
        )
    return made


@settings(max_examples=40)
@given(made=requests(), words=st.sampled_from([2, 3, VOCAB]), most=st.sampled_from([1, 4, 9]))
def test_answers_are_those_of_plain_decoding(made: list[Submit], words: int, most: int) -> None:
    plain, drafting = (
        serve(
            make_core(BLOCKS, max_running=8, max_queue_s=1e3, speculation_tokens=tokens),
            Sampled(ToyRunner(BLOCKS, words)),
            made,
        )
        for tokens in (0, most)
    )
    assert plain.drafted == 0
    assert drafting.said == plain.said
    assert drafting.steps <= plain.steps


def test_an_answer_that_can_be_guessed_takes_fewer_steps() -> None:
    made = [submit(1, [1] * 8, 100)]
    plain = serve(make_core(BLOCKS), Sampled(ToyRunner(BLOCKS, 1)), made)
    drafting = serve(make_core(BLOCKS, speculation_tokens=8), Sampled(ToyRunner(BLOCKS, 1)), made)
    assert drafting.said == plain.said
    assert plain.steps == 100
    assert drafting.steps <= 20
    assert drafting.accepted >= 80
    assert drafting.drafted <= 100


def test_nothing_is_drafted_beside_a_prompt_or_where_blocks_are_short() -> None:
    core, runner, builder = (
        make_core(BLOCKS, budget=16, speculation_tokens=8),
        Sampled(ToyRunner(BLOCKS, 1)),
        StepBuilder(),
    )
    core.handle(submit(1, [0] * 8, 100), 0.0)
    core.handle(submit(2, [0, 1] * 60, 1), 0.0)
    while 2 in core.scheduler.requests:
        chunks = core.schedule(0.0)
        assert not any(chunk.drafted for chunk in chunks)
        runner.submit(builder.build(chunks))
        core.commit(chunks, runner.draw(core.draw_rows(chunks)), 0.01, 0.0)
    # Of four blocks one sequence has all but one: a draft may not take that.
    core = make_core(4, speculation_tokens=8)
    core.handle(submit(1, [0] * 44, 20), 0.0)
    runner = Sampled(ToyRunner(4, 1))
    while chunks := core.schedule(0.0):
        assert all(len(chunk.sequence.slots) * 16 >= chunk.start + chunk.length for chunk in chunks)
        assert all(chunk.start + chunk.length <= 48 or chunk.start >= 48 for chunk in chunks if chunk.drafted)
        runner.submit(builder.build(chunks))
        core.commit(chunks, runner.draw(core.draw_rows(chunks)), 0.01, 0.0)
    assert core.scheduler.speculation.accepted > 0


@pytest.mark.parametrize(("words", "accepts"), [([7], True), (list(range(40)), False)])
def test_a_simulated_engine_takes_the_time_of_all_rows(words: list[int], accepts: bool) -> None:
    made = [submit(1, [7, 8] * 10, 60), submit(2, [7] * 20, 60, sampling=Sampling(seed=3, num_logprobs=1))]
    runs = []
    for tokens in (0, 6):
        clock = Clock()
        runner = SimRunner(TimeModel(1000.0, 1.0, 0.25), words, clock=clock.now, sleep=clock.sleep)
        runs.append(serve(make_core(BLOCKS, speculation_tokens=tokens), runner, made))
        rows = (
            runs[-1].usages[1].output_tokens
            + runs[-1].usages[2].output_tokens
            - 2
            - runs[-1].accepted
            + runs[-1].drafted
        )
        prompts_s = 40 / 1000.0
        assert clock.seconds == pytest.approx(prompts_s + (runs[-1].steps - 1) * 1.0 + rows * 0.25, abs=0.01)
    plain, drafting = runs
    assert drafting.said == plain.said
    assert (drafting.accepted > 50) == accepts
    assert (drafting.steps < plain.steps // 2) == accepts


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
