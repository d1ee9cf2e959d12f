"""Rates of work done and forecasts from them."""

from __future__ import annotations

import pytest

from services.common.decaying_sum import DecayingSum
from services.common.drain_rate import BusyDrain


def test_a_steady_rate_is_known_soon_and_fades_when_nothing_is_done() -> None:
    rate = DecayingSum(10)
    assert rate.rate(0) == 0
    for tick in range(200):
        rate.add(4, tick * 0.1)
    assert rate.rate(19.9) == pytest.approx(40, rel=0.05)
    assert rate.rate(60) < 1


def test_a_young_rate_is_not_taken_for_a_slow_one() -> None:
    rate = DecayingSum(10)
    for tick in range(11):
        rate.add(1, tick * 0.1)
    assert rate.rate(1.0) == pytest.approx(11, rel=0.1)


def test_time_in_which_nobody_waits_does_not_count() -> None:
    drain = BusyDrain()
    drain.add(1000, 0)
    assert drain.forecast_s(10, 0) is None
    for busy_from in (0, 100, 1000):
        drain.busy(True, busy_from)
        for tick in range(1, 51):
            drain.add(2, busy_from + tick * 0.1)
        drain.busy(False, busy_from + 5)
        drain.add(1000, busy_from + 6)
    assert drain.forecast_s(40, 2000) == pytest.approx(2, rel=0.1)
