"""Drafting on the real model: tokens, log probabilities, ends and usage are those of plain decoding, in fewer steps."""

from __future__ import annotations

from dataclasses import replace

from services.worker.admission import SchedulerLimits
from services.worker.core import CoreLimits, EngineCore
from services.worker.engine.sampled import Sampled
from services.worker.link_rates import LinkRates
from services.worker.messages import Sampling, Submit
from services.worker.model.runner import CpuRunner
from services.worker.rates import Rates
from tests.worker.cores import KEY, submit
from tests.worker.model.conftest import NUM_BLOCKS, SERVED_CONTEXT
from tests.worker.test_speculation import Run, serve

OUTPUT = 40
# A span, again and again: the model goes on with it.
SPAN = [504, 260, 2470, 282, 4649, 314, 7042, 28, 339, 724, 253, 1838, 30, 198]
GREEDY = Sampling(temperature=0.0)
SAMPLINGS = [
    GREEDY,
    Sampling(temperature=0.7, seed=3),
    Sampling(temperature=1.2, top_p=0.9, seed=4, num_logprobs=3),
    Sampling(temperature=0.0, num_logprobs=2, logit_bias={198: -2.0}),
    Sampling(temperature=0.0, repetition_penalty=1.1),
    Sampling(temperature=0.9, top_k=30, min_p=0.02, seed=5, presence_penalty=0.4, frequency_penalty=0.3),
]


def made() -> list[Submit]:
    requests = []
    for key, sampling in enumerate(SAMPLINGS, 1):
        prompt = [key + 100, *SPAN * 4, *SPAN[: key + 2]]
        stops = [198] if key == 2 else []
        requests.append(
            submit(key, prompt, OUTPUT, sampling=sampling, num_choices=2 if key == 3 else 1, stop_token_ids=stops)
        )
    return requests


def core(runner: CpuRunner, tokens: int, **changes: int) -> EngineCore:
    limits = SchedulerLimits(
        SERVED_CONTEXT, runner.spec.vocab_size, max_queue_s=1e9, speculation_tokens=tokens, speculation_rows=64
    )
    return EngineCore(
        CoreLimits(replace(limits, **changes)),
        NUM_BLOCKS,
        KEY,
        Rates(1e6, 0.01),
        LinkRates(runner.spec.layout.block_bytes),
    )


def test_answers_are_those_of_plain_decoding(runner_bf16: CpuRunner) -> None:
    plain = serve(core(runner_bf16, 0), Sampled(runner_bf16), made())
    drafting = serve(core(runner_bf16, 8), Sampled(runner_bf16), made())
    assert drafting.said == plain.said
    assert drafting.accepted >= 60, "the test tests something"
    assert drafting.drafted > drafting.accepted, "wrong guesses as well"
    assert drafting.steps < plain.steps


def test_one_by_one_they_are_the_same(runner_bf16: CpuRunner) -> None:
    together = serve(core(runner_bf16, 8), Sampled(runner_bf16), made())
    alone = Run()
    for request in made():
        one = serve(core(runner_bf16, 5), Sampled(runner_bf16), [request])
        alone.outputs |= one.outputs
    assert alone.outputs == together.outputs
