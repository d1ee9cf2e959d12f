"""What predictions that turned out wrong teach."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.calibration import Calibration, Pace
from services.router.domain import Prediction
from services.router.policies.correction import NUM_WEIGHTS, PRIOR, Correction, features


def prediction(feature: tuple[float, ...], correction: Correction, tpot_s: float = 0.02) -> Prediction:
    ttft_s = float(np.dot(feature, correction.weights))
    return Prediction(feature, 1.0, ttft_s, tpot_s * correction.tpot, sum(feature[1:]), tpot_s, sum(feature[1:4]))


@settings(max_examples=25)
@given(
    st.lists(st.floats(0.5, 2.0), min_size=NUM_WEIGHTS - 1, max_size=NUM_WEIGHTS - 1),
    st.floats(0.0, 5.0),
    st.integers(0, 100),
)
def test_systematic_errors_are_learned(weights: list[float], overhead: float, seed: int) -> None:
    calibration, rng = Calibration(), random.Random(seed)
    errors = []
    for _ in range(400):
        tokens = rng.choice([30, 200, 700, 1500])
        feature = features(rng.choice([0.0, 0.05, 0.5, 2.0]) * rng.random(), tokens / 1500, 0.05 * rng.random(), tokens)
        actual_s = float(np.dot(feature, (overhead, *weights))) * rng.uniform(0.9, 1.1)
        made = prediction(feature, calibration.correction)
        errors.append(abs(made.ttft_s - actual_s) / actual_s)
        calibration.observe(made, ttft_s=actual_s, tpot_s=0.03)
    assert np.median(errors[200:]) < 0.1
    assert calibration.correction.tpot == pytest.approx(1.5, rel=0.01)


@given(st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=60))
def test_corrections_are_bounded_and_more_queue_never_predicts_less(actual: list[float]) -> None:
    calibration = Calibration()
    for ttft_s in actual:
        made = prediction(features(0.4, 0.2, 0.01, 300), calibration.correction)
        calibration.observe(made, ttft_s=ttft_s, tpot_s=ttft_s)
    weights = calibration.correction.weights
    assert 0.0 <= weights[0] <= 10.0
    assert all(1 / 3 <= weight <= 3 for weight in weights[1:])
    queues = [np.dot(features(queue_s, 0.2, 0.01, 300), weights) for queue_s in np.linspace(0, 3, 50)]
    assert (np.diff(queues) > 0).all()


def test_nothing_learned_changes_nothing() -> None:
    feature = features(0.7, 0.3, 0.1, 400)
    assert np.dot(feature, PRIOR) == pytest.approx(1.1)
    calibration = Calibration()
    calibration.observe(prediction(feature, Correction()), ttft_s=0.0, tpot_s=0.0)
    assert calibration.correction == Correction()


def test_a_slow_worker_is_known_by_its_pace_and_chance_is_not_taken_for_one() -> None:
    pace, rng = Pace(), random.Random(1)
    assert all(pace.observe(rng.gauss(0.0, 0.2), at / 10) == 1.0 for at in range(300))
    for at in range(300):
        factor = pace.observe(0.5, 30 + at / 10)
    assert 1.2 < factor < 1.7
    assert pace.observe(0.0, 2000.0) == 1.0
