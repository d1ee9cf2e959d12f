"""Preble's rule."""

from __future__ import annotations

import numpy as np

from services.router.policies.costs import estimate
from services.router.policies.e2 import e2
from tests.router.policies.views import request_of, rows_of, view_of


def choice(local_blocks: list[int], window_s: list[float], *, prompt_tokens: int = 640) -> int:
    request, view = request_of(prompt_tokens), view_of(rows_of(len(local_blocks)), local_blocks)
    view.pressure.window_s[:] = window_s
    return int(np.argmin(e2(request, view, estimate(request, view))))


def test_a_long_prefix_is_exploited_at_its_least_busy_holder() -> None:
    assert choice([30, 30, 20, 0], [11.0, 10.0, 9.0, 8.0]) == 1


def test_a_short_prefix_is_no_reason() -> None:
    assert choice([15, 0, 0], [9.0, 6.0, 7.0]) == 1


def test_among_equally_busy_ones_what_is_held_saves_prefill() -> None:
    assert choice([0, 15, 0], [6.0, 6.0, 6.0]) == 1


def test_a_holder_with_much_more_work_than_another_gets_no_more() -> None:
    assert choice([30, 0, 0], [29.0, 20.0, 19.0]) == 0
    assert choice([30, 0, 0], [60.0, 20.0, 19.0]) == 2


def test_the_first_requests_of_an_idle_mesh_stay_with_their_prefix() -> None:
    assert choice([30, 0, 0], [0.5, 0.0, 0.0]) == 0
