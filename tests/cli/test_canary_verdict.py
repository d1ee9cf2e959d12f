"""Verdicts on a canary from what was measured."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from services.cli.canary_verdict import (
    LEAST_DIFFERENCE_S,
    LEAST_TIMED,
    Limits,
    Probed,
    Traffic,
    probe_failure,
    traffic_failure,
)

LOGPROBS = st.lists(st.floats(-100, 0), min_size=1, max_size=20)
SECONDS = st.floats(0, 10)
LIMITS = st.builds(Limits, st.floats(0.01, 5), st.floats(1, 100), st.floats(0, 1))
PROBED = st.builds(Probed, LOGPROBS, st.just([[1, 2], [3, 4, 3]]), SECONDS, SECONDS)
TRAFFIC = st.builds(Traffic, *[st.integers(0, 1000)] * 3, SECONDS, SECONDS)


@given(PROBED, LIMITS)
def test_the_same_measurements_pass(probed: Probed, limits: Limits) -> None:
    assert probe_failure(probed, probed, limits) == ""


@given(PROBED, PROBED, LIMITS)
def test_less_likely_texts_fail_beyond_the_tolerance_alone(stable: Probed, canary: Probed, limits: Limits) -> None:
    canary = replace(canary, ttft_s=stable.ttft_s, tpot_s=stable.tpot_s)
    lost = stable.quality - canary.quality
    assert probe_failure(stable, canary, limits).startswith("quality") == (lost > limits.quality_nats)


@given(PROBED, LIMITS, st.sampled_from([math.nan, math.inf, -math.inf]), st.data())
def test_what_is_no_number_fails(probed: Probed, limits: Limits, value: float, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(probed.logprobs)))
    odd = [*probed.logprobs[:at], value, *probed.logprobs[at:]]
    assert "no numbers" in probe_failure(probed, replace(probed, logprobs=odd), limits)


@given(PROBED, LIMITS)
def test_no_probes_and_dull_answers_fail(probed: Probed, limits: Limits) -> None:
    nothing = replace(probed, logprobs=[])
    assert probe_failure(probed, nothing, limits)
    assert probe_failure(nothing, probed, limits)
    for dull in ([], [7, 7, 7]):
        canary = replace(probed, answers=[[1, 2], dull])
        assert "1 of 2" in probe_failure(probed, canary, limits)
        assert probe_failure(canary, canary, limits) == "", "the stable version does so, too"


@given(PROBED, SECONDS, SECONDS, LIMITS)
def test_slower_answers_fail(probed: Probed, ttft_s: float, tpot_s: float, limits: Limits) -> None:
    canary = replace(probed, ttft_s=ttft_s, tpot_s=tpot_s)
    failure = probe_failure(probed, canary, limits)
    pairs = [(probed.ttft_s, ttft_s), (probed.tpot_s, tpot_s)]
    slow = any(new > stable * limits.latency_ratio and new > stable + LEAST_DIFFERENCE_S for stable, new in pairs)
    assert failure.startswith("latency") == slow


@given(TRAFFIC, LIMITS)
def test_the_same_traffic_passes(seen: Traffic, limits: Limits) -> None:
    assert traffic_failure(seen, seen, limits) == ""


@given(TRAFFIC, TRAFFIC, LIMITS)
def test_more_errors_fail_whatever_the_times(stable: Traffic, canary: Traffic, limits: Limits) -> None:
    assume(canary.attempts)
    failure = traffic_failure(stable, canary, limits)
    assert failure.startswith("errors") == (canary.error_rate > stable.error_rate + limits.error_rate)
    if canary.failed > 0 and stable.failed == 0 and limits.error_rate == 0:
        assert failure


@given(TRAFFIC, TRAFFIC, LIMITS)
def test_few_times_say_nothing(stable: Traffic, canary: Traffic, limits: Limits) -> None:
    canary = replace(canary, failed=0, timed=LEAST_TIMED - 1)
    assert traffic_failure(stable, canary, limits) == ""
