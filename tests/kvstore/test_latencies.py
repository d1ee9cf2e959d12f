"""Quantiles of recorded durations."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from services.kvstore.latencies import Latencies


def test_nothing_recorded_is_nothing() -> None:
    now = Latencies().statistics()
    assert (now.count, now.p50_s, now.p99_s) == (0, 0.0, 0.0)


@given(st.lists(st.floats(1e-5, 100.0), min_size=1, max_size=200))
def test_quantiles_are_never_too_low_and_little_too_high(durations: list[float]) -> None:
    latencies = Latencies()
    for duration in durations:
        latencies.record(duration)
    now = latencies.statistics()
    ordered = sorted(durations)
    assert now.count == len(durations)
    for share, found in ((0.5, now.p50_s), (0.99, now.p99_s)):
        exact = ordered[math.ceil(share * len(ordered)) - 1]
        assert exact * 0.999 <= found <= exact * 1.415
