"""Speeds learned from steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.learned_speed import LearnedSpeed
from services.common.running_mean import RunningMean


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.integers(1, 20))
def test_a_sample_that_came_often_counts_as_often(value: float, sample: float, times: int) -> None:
    at_once, singly = RunningMean(value, 0.2), RunningMean(value, 0.2)
    at_once.update(sample, times)
    for _ in range(times):
        singly.update(sample)
    assert at_once.value == pytest.approx(singly.value, rel=1e-9, abs=1e-9)


def test_steps_move_the_speed_that_they_tell_of() -> None:
    speed = LearnedSpeed(1000.0, 0.010)
    speed.observe(100, 10, 0.055)
    assert (speed.prefill_tokens_per_s, speed.decode_step_s) == (pytest.approx(1200.0), 0.010)
    speed.observe(0, 4, 0.020, steps=2)
    assert speed.decode_step_s == pytest.approx(0.010 + 0.010 * (1 - 0.8**2))
    # Too few prompt tokens to tell prefill from decode.
    before = speed.prefill_tokens_per_s, speed.decode_step_s
    speed.observe(8, 4, 1.0)
    assert (speed.prefill_tokens_per_s, speed.decode_step_s) == before


def test_what_is_unknown_is_what_was_first_seen() -> None:
    speed = LearnedSpeed(0.0, 0.0)
    speed.observe(100, 0, 0.1)
    speed.observe(0, 1, 0.02)
    assert (speed.prefill_tokens_per_s, speed.decode_step_s) == (1000.0, 0.02)
