"""Batch work gives way to what clients wait for, step by step, and is not forgotten."""

from __future__ import annotations

import pytest

from services.common.fair_queue import RequestClass
from services.worker.core import EngineCore
from services.worker.engine.batch import StepBuilder
from services.worker.messages import Resume
from services.worker.prompt_budget import MIN_PREFILL_TOKENS
from services.worker.sampler import draw_tokens
from tests.worker.cores import known_output, make_core, submit
from tests.worker.toy import ToyRunner

# Of a step; an eighth of it is what batch work may have while others come.
BUDGET, SHORT = 320, 40
BATCH = RequestClass.BATCH.value


def step(core: EngineCore, runner: ToyRunner, now: float) -> dict[int, int]:
    """Tokens that a step computed, by key."""
    chunks = core.schedule(now)
    runner.submit(StepBuilder().build(chunks))
    core.commit(chunks, draw_tokens(runner.collect(), EngineCore.draw_rows(chunks)), 0.01, now)
    return {chunk.sequence.request.key: chunk.length for chunk in chunks}


def parts() -> tuple[EngineCore, ToyRunner]:
    return make_core(64, budget=BUDGET, cache=False, max_queue_s=100.0), ToyRunner(64)


def test_prompts_of_batch_work_are_computed_where_there_are_no_others() -> None:
    core, runner = parts()
    core.handle(submit(1, [1] * 200, 5, priority=BATCH), 0.0)
    core.handle(submit(2, [2] * 100, 5), 0.0)
    core.handle(submit(3, [3] * 100, 5, priority=2), 0.0)
    assert step(core, runner, 0.0) == {2: 100, 3: 100}
    assert step(core, runner, 0.0) == {2: 1, 3: 1, 1: SHORT}
    # One that has begun waits as well, and so do those that decode.
    core.handle(submit(4, [4] * 30, 5), 0.0)
    assert step(core, runner, 0.0) == {2: 1, 3: 1, 4: 30}


def test_decodes_of_batch_work_wait_for_prompts_of_others() -> None:
    core, runner = parts()
    core.handle(submit(1, [1] * 20, 3, priority=BATCH), 0.0)
    assert step(core, runner, 0.0) == {1: 20}
    assert step(core, runner, 0.0) == {1: 1}
    core.handle(submit(2, [2] * 200, 2), 0.0)
    core.handle(submit(3, [3] * 200, 2), 0.0)
    # The second one's prompt takes two steps.
    assert step(core, runner, 0.0) == {2: 200, 3: 120}
    assert step(core, runner, 0.0) == {2: 1, 3: 80}
    assert step(core, runner, 0.0) == {3: 1, 1: 1}


def test_steps_of_batch_work_are_short_only_while_others_come() -> None:
    core, runner = parts()
    core.handle(submit(1, [1] * 200, 1, priority=BATCH), 0.0)
    assert step(core, runner, 0.0) == {1: 200}
    core.handle(submit(2, [2] * 16, 1), 1.0)
    assert step(core, runner, 1.0) == {2: 16}
    core.handle(submit(3, [3] * 200, 1, priority=BATCH), 2.0)
    assert step(core, runner, 2.0) == {3: SHORT}
    assert step(core, runner, 12.0) == {3: 160}


def test_batch_work_goes_on_beside_prompts_that_never_end() -> None:
    core, runner = parts()
    core.handle(submit(1, [1] * 200, 1, priority=BATCH), 0.0)
    computed = []
    for key in range(2, 45):
        core.handle(submit(key, [key] * 16, 1), 0.0)
        computed.append(step(core, runner, 0.0).get(1, 0))
    assert computed == ([0] * 20 + [SHORT]) * 2 + [0]


def test_batch_work_goes_on_beside_prompts_that_fill_every_step() -> None:
    """It comes first and still waits when those come that wait for a step of their own, ever more of them."""
    core, runner = parts()
    core.handle(submit(1, [1] * 100, 2, priority=BATCH), 0.0)
    computed = []
    for key in range(2, 45):
        for twin in (key, key + 100):
            core.handle(submit(twin, [key] * 200, 1), 0.0)
        lengths = step(core, runner, 0.0)
        assert sum(lengths.values()) == BUDGET
        computed.append(lengths.get(1, 0))
    assert computed == ([0] * 20 + [MIN_PREFILL_TOKENS]) * 2 + [0]


@pytest.mark.parametrize(("num_blocks", "overtakes"), [(64, True), (24, False)])
def test_batch_work_overtakes_nobody_who_lacks_blocks(num_blocks: int, overtakes: bool) -> None:
    """One prompt is computed in many steps while another of 15 blocks and a short one of batch work wait."""
    core, runner = make_core(num_blocks, budget=11, cache=False, max_queue_s=100.0), ToyRunner(num_blocks)
    core.handle(submit(1, [1] * 20, 1, priority=BATCH), 0.0)
    for key in (2, 3):
        core.handle(submit(key, [key] * 240, 1), 0.0)
    steps = [step(core, runner, 0.0) for _ in range(21)]
    assert all(lengths == {2: 11} for lengths in steps[:20])
    assert (1 in steps[20]) is overtakes
    while not core.is_idle:
        steps.append(step(core, runner, 0.0))
    assert next(key for lengths in steps for key in lengths if key in (1, 3)) == (1 if overtakes else 3)


def test_batch_work_that_has_little_to_catch_up_with_cuts_no_prompt_of_others() -> None:
    core, runner = parts()
    core.handle(submit(1, [1] * 40, 20, priority=BATCH, hold_s=50.0), 0.0)
    step(core, runner, 0.0)
    core.handle(Resume(1, [known_output(0, [5, 6, 7])]), 0.0)
    core.handle(submit(2, [2] * 200, 2), 0.0)
    core.handle(submit(3, [3] * 200, 2), 0.0)
    assert step(core, runner, 0.0) == {2: 200, 3: 120}
    assert step(core, runner, 0.0) == {2: 1, 3: 80}
    assert step(core, runner, 0.0) == {3: 1, 1: 4}
