"""The pace of a batch's lines, with times of the test's own."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.batches.pace import Pace


@settings(max_examples=50, deadline=None)
@given(
    most=st.integers(1, 64),
    steps=st.lists(st.tuples(st.booleans(), st.floats(0.001, 100), st.floats(0, 10)), max_size=100),
)
def test_there_is_always_a_turn_and_never_too_many(most: int, steps: list[tuple[bool, float, float]]) -> None:
    pace, now_s = Pace(most), 0.0
    for is_answered, retry_after_s, passed_s in steps:
        now_s += passed_s
        pace.answered() if is_answered else pace.refused(retry_after_s, now_s)
        assert 1 <= pace.limit <= most
        assert 0 <= pace.pause_s(now_s) <= 30.001
    assert pace.pause_s(now_s + 30.001) == 0


def test_it_grows_by_one_for_a_round_and_halves_once_for_those_refused_together() -> None:
    pace = Pace(64)
    first = pace.limit
    for _ in range(200):
        pace.answered()
    grown = pace.limit
    assert first < grown < 64
    for _ in range(5):
        pace.refused(2.0, 10.0)
    assert pace.limit == grown // 2
    assert pace.pause_s(11.0) == 1.0
    pace.refused(1.0, 13.0)
    assert pace.limit == grown // 4
