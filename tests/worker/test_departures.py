"""Readers asked to go on elsewhere, a share at a time, by random departures."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.departures import Departures

PATIENCE_S = 1.0


@given(count=st.integers(0, 40), steps=st.lists(st.tuples(st.sampled_from(["go", "add", "wait"]), st.integers(0, 50))))
def test_each_is_asked_once_and_a_share_at_a_time(count: int, steps: list[tuple[str, int]]) -> None:
    departures, now_s, size = Departures(range(count), PATIENCE_S), 0.0, count
    asked: dict[int, float] = {}
    gone: set[int] = set()

    def ask() -> None:
        for key in departures.due(now_s):
            assert key not in asked
            assert key not in gone
            asked[key] = now_s
        present = [key for key, at_s in asked.items() if key not in gone and now_s - at_s < PATIENCE_S]
        assert len(present) <= max(1, math.ceil(count / 8))

    ask()
    for action, number in steps:
        if action == "wait":
            now_s += number / 4
        elif action == "add":
            departures.add(size)
            size += 1
        elif number < size:
            departures.gone(number)
            gone.add(number)
        ask()
    while (next_s := departures.next_s()) is not None:
        assert next_s > now_s, "whoever looks then is not too early, and looks seldom"
        now_s = next_s
        ask()
    assert asked.keys() | gone == set(range(size))


@pytest.mark.parametrize(("count", "turns"), [(1, 1), (8, 8), (9, 5), (200, 8)])
def test_those_who_cannot_go_delay_nobody_for_long(count: int, turns: int) -> None:
    departures, now_s, waited = Departures(range(count), PATIENCE_S), 0.0, 1
    left = count - len(departures.due(now_s))
    while left:
        now_s += PATIENCE_S
        waited += 1
        left -= len(departures.due(now_s))
    assert waited == turns
