"""Work granted of late."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.recent_work import BUCKET_S, NUM_BUCKETS, RecentWork
from services.router.worker_rows import Selection

WINDOW_S = BUCKET_S * NUM_BUCKETS


@given(st.lists(st.tuples(st.integers(0, 40), st.floats(0.0, 60.0), st.floats(0.0, 5.0)), max_size=40))
def test_the_window_counts_what_was_granted_in_it(grants: list[tuple[int, float, float]]) -> None:
    recent, now_s = RecentWork(), 1000.0
    counted: list[tuple[float, int, float]] = []
    for row, pause_s, work_s in grants:
        now_s += pause_s
        recent.add(row, now_s, work_s=work_s, prefill_s=work_s / 2)
        counted.append((now_s, row, work_s))
    first_s = (now_s // BUCKET_S - NUM_BUCKETS + 1) * BUCKET_S
    totals = recent.totals(Selection.of(np.arange(50)), now_s)
    for row in range(50):
        mine = [work_s for at_s, of, work_s in counted if of == row and at_s >= first_s]
        assert totals.work_s[row] == pytest.approx(sum(mine))
        assert totals.prefill_s[row] == pytest.approx(sum(mine) / 2)
        assert totals.grants[row] == len(mine)
    assert 0.0 <= totals.lasted_s <= WINDOW_S


def test_all_is_forgotten_in_time_and_with_its_worker() -> None:
    recent = RecentWork()
    for row in range(20):
        recent.add(row, 5.0, work_s=1.0, prefill_s=1.0)
    recent.forget(3)
    assert recent.totals(Selection.of(np.array([3, 4])), 6.0).work_s.tolist() == [0.0, 1.0]
    assert recent.totals(Selection.of(np.array([4])), 5.0 + 10 * WINDOW_S).work_s.tolist() == [0.0]
