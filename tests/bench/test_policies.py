"""What the sweep over policies makes of its runs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.policies_cases import CLUSTERS, SUBJECTS, Case, run_once
from bench.policies_plot import plot
from bench.policies_verdict import Point, sustained, verdict


def point(policy: str, rate: float, share: float, *, ttft_s: float = 0.1) -> Point:
    figures = {
        "offered_rps": rate,
        "goodput_share": share,
        "goodput_rps": rate * share,
        "ttft_mean_s": ttft_s,
        "ttft_p50_s": 0.1 * rate,
        "ttft_p99_s": 0.0,
        "hit_rate_of_ideal": share,
    }
    return Point(policy, rate, figures)


def test_the_sustained_rate_lies_between_the_loads_around_it() -> None:
    points = [point("a", 30.0, 0.5), point("a", 10.0, 1.0), point("a", 20.0, 0.95)]
    assert sustained(points, 0.9)["a"] == pytest.approx(20.0 + 10.0 * 0.05 / 0.45)
    assert sustained(points, 0.4)["a"] == 30.0
    assert sustained(points[:1], 0.9)["a"] == 0.0
    # What is sustained again beyond a load that was not does not count.
    assert sustained([*points, point("a", 40.0, 1.0)], 0.9)["a"] < 30.0


def test_the_verdict_is_the_worst_of_all_loads() -> None:
    points = [
        point("predicted_ttft", 1.0, 0.9, ttft_s=0.2),
        point("predicted_ttft", 2.0, 0.8, ttft_s=0.3),
        point("oracle", 1.0, 1.0, ttft_s=0.1),
        point("oracle", 2.0, 0.8, ttft_s=0.3),
        point("round_robin", 1.0, 0.45),
        point("round_robin", 2.0, 0.5),
        point("e2", 2.0, 0.9),
    ]
    judged = verdict(points)
    assert judged.over_plain == pytest.approx(1.6)
    assert judged.over_oracle == pytest.approx(0.9)
    assert judged.over_others == pytest.approx(0.8 / 0.9)
    assert judged.ttft_over_oracle == pytest.approx(2.0)
    assert verdict([one for one in points if one.policy != "oracle"]).over_oracle is None


def test_the_plot_is_a_document_with_a_line_for_each_policy_in_each_panel() -> None:
    points = [point(policy, rate, 0.9) for policy in ("a", "b") for rate in (1.0, 2.0, 4.0)]
    document = ElementTree.fromstring(plot("t", {"few workers": points, "many workers": points}))
    assert len(document.findall(".//{*}polyline")) == 2 * 2 * 4


def test_a_run_is_made_once_for_each_case(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 300 * at, "input_length": 1100, "output_length": 7, "hash_ids": [0, at, 99]} for at in range(20)
    ]
    trace = gzip.compress("\n".join(map(json.dumps, rows)).encode())
    (tmp_path / SUBJECTS["synthetic"].file).write_bytes(trace)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    first, other = (
        Case(tmp_path, "synthetic", "all", 10, CLUSTERS["16"], 1.0, name, True, 0) for name in ("e2", "round_robin")
    )
    figures = run_once(first, scratch)
    assert figures["requests"] == 10
    assert figures == run_once(first, None)
    (kept,) = scratch.iterdir()
    kept.write_text(json.dumps(figures | {"requests": 11}))
    assert run_once(first, scratch)["requests"] == 11
    assert run_once(other, scratch)["requests"] == 10
    assert run_once(first, None)["requests"] == 10
