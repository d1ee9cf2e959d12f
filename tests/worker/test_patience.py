"""Batch work gives way to what clients wait for, step by step, and is not forgotten."""

from __future__ import annotations

from services.common.fair_queue import RequestClass
from services.worker.core import EngineCore
from services.worker.engine.batch import StepBuilder
from services.worker.sampler import draw_tokens
from tests.worker.cores import make_core, submit
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
    assert step(core, runner, 0.0) == {2: 200, 3: 119}
    assert step(core, runner, 0.0) == {2: 1, 3: 81}
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
