"""What holds of costs and policies whatever the view."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from services.router.policies import POLICIES
from services.router.policies.correction import NUM_WEIGHTS, Correction
from services.router.policies.costs import estimate
from services.router.policies.view import PolicyRequest, PolicyView
from tests.router.policies.reference import costs_of
from tests.router.policies.views import request_of, rows_of, view_of, views

PROMPT = 700
# Those that look at how much is there; round_robin does not.
LOOKING = [name for name in POLICIES if name != "round_robin"]
loaded = views(prompt_tokens=PROMPT)


def scores_of(policy: str, request: PolicyRequest, view: PolicyView) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return POLICIES[policy](request, view, estimate(request, view))


def chosen_by(policy: str, request: PolicyRequest, view: PolicyView) -> int:
    return int(scores_of(policy, request, view).argmin())


@settings(max_examples=200)
@given(st.sampled_from(LOOKING), loaded, st.data())
def test_more_queue_never_makes_a_worker_preferred(policy: str, view: PolicyView, data: st.DataObject) -> None:
    request = request_of(PROMPT)
    before = chosen_by(policy, request, view)
    at = data.draw(st.integers(0, len(view.rows) - 1))
    assume(at != before)
    rows = view.rows.copy()
    more = data.draw(st.integers(1, 5))
    rows["pending"][at] += more
    rows["pending_tokens"][at] += 300.0 * more
    rows["pending_by_class"][at, 0] += 300.0 * more
    view.pressure.window_s[at] += float(more)
    assert chosen_by(policy, request, replace(view, rows=rows)) != at


@settings(max_examples=200)
@given(loaded, st.floats(0.1, 10.0))
def test_the_choice_does_not_depend_on_the_unit_of_time(view: PolicyView, factor: float) -> None:
    request = request_of(PROMPT)
    rows = view.rows.copy()
    for name in ("fixed_s", "decoding_s", "prefill_token_s", "prefill_pair_s", "decode_sequence_s", "context_token_s",
                 "least_step_s", "decode_step_s", "decode_slope_s"):  # fmt: skip
        rows[name] *= factor
    rows["told_s"] = request.now_s - (request.now_s - rows["told_s"]) * factor
    lately = replace(view.pressure, arrivals_per_s=view.pressure.arrivals_per_s / factor,
                     window_s=view.pressure.window_s * factor)  # fmt: skip
    for policy in ("predicted_ttft", "least_loaded", "prefix_hash"):
        scores = scores_of(policy, request, view)
        scaled = scores_of(policy, request, replace(view, rows=rows, pressure=lately))
        by = factor if policy == "predicted_ttft" else 1.0
        assert np.allclose(scaled, scores * by, rtol=1e-6)


@settings(max_examples=200)
@given(
    loaded,
    st.sampled_from([5, 60, PROMPT, 2000]),
    st.integers(0, 3),
    st.integers(1, 3),
    st.lists(st.floats(0.1, 3.0), min_size=NUM_WEIGHTS, max_size=NUM_WEIGHTS),
    st.floats(0.0, 1.2),
    st.booleans(),
)
def test_every_candidate_costs_what_it_would_alone_in_plain_arithmetic(
    view: PolicyView, prompt: int, priority: int, choices: int, weights: list[float], share: float, quadratic: bool
) -> None:
    request = replace(request_of(prompt, priority=priority), num_choices=choices)
    rows = view.rows.copy()
    rows["pace"] = np.linspace(0.5, 2.0, len(rows))
    rows["least_step_s"], rows["pending_pairs"], rows["queued_pairs"] = 0.01, 1e4, 1e5
    rows["prefill_pair_s"], rows["context_token_s"] = quadratic * 1e-8, quadratic * 1e-7
    rows["context_tokens"], rows["pending_blocks"] = 500.0 * rows["decoding"], 10.0 * rows["pending"]
    local = np.minimum(view.local_blocks, request.usable_blocks)
    lately = replace(view.pressure, prefill_share=np.full(len(rows), share), reuse=share / 2)
    view = replace(view, rows=rows, local_blocks=local, pressure=lately, correction=Correction(tuple(weights), 1.5))
    costs = estimate(request, view)
    for at in range(len(rows)):
        expected = costs_of(request, view, at)
        for name in expected.__dataclass_fields__:
            assert getattr(costs, name)[at] == pytest.approx(getattr(expected, name), rel=1e-9, abs=1e-12), name
        assert np.dot(costs.features(at), weights) * rows["pace"][at] == pytest.approx(costs.predicted_ttft_s[at])


@settings(max_examples=100)
@given(loaded)
def test_what_is_predicted_is_positive_finite_and_adds_up(view: PolicyView) -> None:
    costs = estimate(request_of(PROMPT), view)
    for values in costs.terms().values():
        assert np.isfinite(values).all()
    for values in (costs.queue_s, costs.pull_s, costs.prefill_s, costs.interference_s, costs.harm_s, costs.work_s):
        assert (values >= 0).all()
    assert (costs.predicted_ttft_s > 0).all()


@settings(max_examples=100)
@given(loaded, st.integers(1, 600))
def test_a_longer_prompt_takes_longer_everywhere(view: PolicyView, more: int) -> None:
    shorter, longer = (estimate(request_of(PROMPT + extra), view) for extra in (0, more))
    assert (longer.predicted_ttft_s >= shorter.predicted_ttft_s - 1e-9).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_candidates_share_what_has_no_prefix_in_common(policy: str) -> None:
    rows = rows_of(4)
    view = view_of(rows, [0] * 4)
    counts: Counter[int] = Counter()
    for turn in range(100):
        request = request_of(PROMPT, sequence=turn, prefix_key=turn * 0x9E3779B97F4A7C15 % 2**64)
        scores = scores_of(policy, request, view)
        if scores.max() - scores.min() > 1e-9:
            counts[int(scores.argmin())] += 1
    # All scores alike: the placer draws by the prefix.
    assert not counts or (len(counts) == 4 and max(counts.values()) <= 45)


def test_urgent_requests_overtake_what_waits_and_not_what_has_begun() -> None:
    rows = rows_of(3)
    rows["running"], rows["queued_tokens"] = [0, 2, 1], [0, 1000, 1000]
    rows["waiting"][2], rows["waiting_by_class"][2] = 1, (0, 0, 800)
    view = view_of(rows, [0] * 3)
    urgent, late = (estimate(request_of(PROMPT, priority=priority), view).queue_s for priority in (1, 3))
    assert late[1] == pytest.approx(late[2])
    assert urgent[1] == pytest.approx(late[1])
    assert urgent[2] == pytest.approx(late[2] / 5)


def test_time_since_the_report_shortens_the_queue() -> None:
    rows = rows_of(3)
    rows["running"], rows["queued_tokens"] = 1, 1000
    rows["told_s"] = [50.0, 49.9, 40.0]
    queue_s = estimate(request_of(PROMPT), view_of(rows, [0] * 3)).queue_s
    assert queue_s[0] - queue_s[1] == pytest.approx(0.1)
    assert queue_s[2] == 0.0
    rows["pending"], rows["pending_tokens"] = 1, 500
    # What no report shows yet has not begun when the report was made.
    assert 500 / 2000 <= estimate(request_of(PROMPT), view_of(rows, [0] * 3)).queue_s[2] < 1000 / 2000
