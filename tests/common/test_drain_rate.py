"""Rates of work done and forecasts from them."""

from __future__ import annotations

import pytest

from services.common.drain_rate import DrainRate


def test_a_steady_rate_is_known_soon_and_fades_when_nothing_is_done() -> None:
    rate = DrainRate(window_s=10)
    assert rate.forecast_s(5, 0) is None
    for tick in range(200):
        rate.add(4, tick * 0.1)
    assert rate.per_s(19.9) == pytest.approx(40, rel=0.05)
    assert rate.forecast_s(80, 19.9) == pytest.approx(2, rel=0.05)
    assert rate.per_s(60) < 1


def test_a_young_rate_is_not_taken_for_a_slow_one() -> None:
    rate = DrainRate(window_s=10)
    for tick in range(11):
        rate.add(1, tick * 0.1)
    assert rate.per_s(1.0) == pytest.approx(11, rel=0.1)
