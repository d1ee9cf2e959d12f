"""What the core does with given requests, run to their end."""

from __future__ import annotations

import pytest

from services.worker.core import EngineCore
from services.worker.engine.batch import StepBuilder
from services.worker.messages import AdmittedRequest, StaleRequest
from services.worker.sampler import draw_tokens
from tests.worker.cores import NUM_BLOCKS, make_core, run_to_end, submit
from tests.worker.toy import ToyRunner, expected_tokens


@pytest.mark.parametrize("cache", [True, False])
def test_preempted_sequences_resume_where_they_were(cache: bool) -> None:
    core, runner = make_core(12, cache=cache, max_queue_s=100.0), ToyRunner(12)
    prompts = {key: [key * 5 + i for i in range(16)] for key in range(1, 5)}
    for key, tokens in prompts.items():
        core.handle(submit(key, tokens, 120), 0.0)
    outputs = run_to_end(core, runner)
    assert core.scheduler.preemptions > 0
    assert outputs == {key: expected_tokens(tuple(tokens), 120) for key, tokens in prompts.items()}


def test_siblings_hit_the_blocks_of_their_leader() -> None:
    core, runner = make_core(), ToyRunner(NUM_BLOCKS)
    core.handle(submit(1, list(range(40)), 2, num_choices=3), 0.0)
    computed = 0
    builder = StepBuilder()
    while chunks := core.schedule(0.0):
        computed += sum(chunk.length for chunk in chunks)
        runner.submit(builder.build(chunks))
        core.commit(chunks, draw_tokens(runner.collect(), EngineCore.draw_rows(chunks)), 0.01, 0.0)
    # The prompt once, its partial block twice more, one decode each.
    assert computed == 40 + 2 * 8 + 3


def test_a_busy_worker_bounds_its_queue_and_an_idle_one_takes_anything() -> None:
    core = make_core(64, max_running=2, max_queue_s=0.1)
    core.handle(submit(1, [1] * 200, 50), 0.0)
    core.handle(submit(2, [2] * 40, 50), 0.0)
    core.handle(submit(3, [3] * 40, 50), 0.0)
    core.handle(submit(4, [4] * 40, 50), 0.0)
    core.handle(submit(5, [5] * 40, 50), 0.0)
    kinds = [type(message) for message in core.to_front]
    assert kinds == [AdmittedRequest] * 4 + [StaleRequest]
    # A decision that counted on blocks which are not here did not know of this work.
    core = make_core(64, max_queue_s=0.1)
    core.handle(submit(1, [1] * 20, 50), 0.0)
    core.handle(submit(2, [2] * 240, 10, expected_local_blocks=15), 0.0)
    assert [type(message) for message in core.to_front] == [AdmittedRequest, StaleRequest]


def test_prefills_go_on_beside_many_decodes() -> None:
    core, runner = make_core(64, budget=16, max_running=20, max_queue_s=100.0), ToyRunner(64)
    for key in range(1, 19):
        core.handle(submit(key, [key, key], 20), 0.0)
    core.handle(submit(19, [7] * 60, 2), 0.0)
    outputs = run_to_end(core, runner)
    assert len(outputs[19]) == 2
