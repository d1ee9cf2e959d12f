"""What a worker learns of its steps' times."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.step_costs import StepCosts, StepWork, assumed_costs
from services.worker.step_fit import StepFit

TRUE = StepCosts(0.018, 0.002, 0.0006, 3e-7, 0.0009, 4e-7)


def works(seed: int, count: int) -> list[StepWork]:
    rng = random.Random(seed)
    result = []
    for _ in range(count):
        prefill = rng.choice([0, 32, 100, 300])
        decodes = rng.randrange(0 if prefill else 1, 16)
        result.append(StepWork(prefill, prefill * rng.uniform(10, 1500), decodes, decodes * rng.randrange(50, 1500)))
    return result


@settings(max_examples=30)
@given(st.integers(0, 1000), st.floats(0.0, 0.2))
def test_the_steps_of_a_machine_are_forecast_after_some_of_them(seed: int, noise: float) -> None:
    fit, rng = StepFit(assumed_costs(1500.0, 0.02)), random.Random(seed)
    for work in works(seed, 400):
        fit.observe(work, TRUE.seconds(work) * rng.uniform(1 - noise, 1 + noise))
    assert min(fit.costs.values()) >= 0
    errors = sorted(abs(fit.costs.seconds(work) / TRUE.seconds(work) - 1) for work in works(seed + 1, 100))
    assert errors[50] < 0.02 + noise / 4


def test_before_any_step_the_benchmark_counts() -> None:
    costs = StepFit(assumed_costs(2000.0, 0.02)).costs
    assert costs.seconds(StepWork(200, 0, 0, 0)) == pytest.approx(0.1)
    assert costs.seconds(StepWork(0, 0, 1, 100)) == pytest.approx(0.02)


def test_a_change_of_speed_is_learned_and_one_slow_step_is_not() -> None:
    fit = StepFit(assumed_costs(1500.0, 0.02))
    for work in works(1, 400):
        fit.observe(work, TRUE.seconds(work))
    work = StepWork(256, 256 * 300.0, 4, 800)
    fit.observe(work, 60.0)
    assert fit.costs.seconds(work) == pytest.approx(TRUE.seconds(work), rel=0.1)
    slow = replace(TRUE, prefill_token_s=2 * TRUE.prefill_token_s)
    for step in works(2, 900):
        fit.observe(step, slow.seconds(step))
    assert fit.costs.seconds(work) == pytest.approx(slow.seconds(work), rel=0.1)


@given(st.lists(st.floats(5e-3, 0.5), min_size=1, max_size=50))
def test_steps_that_are_all_alike_are_forecast_too(seconds: list[float]) -> None:
    fit, work = StepFit(assumed_costs(1000.0, 0.05)), StepWork(0, 0, 3, 300)
    for _ in range(100):
        for step_s in seconds:
            fit.observe(work, step_s)
    assert 0.2 * min(seconds) <= fit.costs.seconds(work) <= 1.1 * max(seconds)
