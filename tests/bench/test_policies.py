"""What the sweep over policies makes of its runs."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from bench.policies import sustained
from bench.policies_plot import Point, plot


def point(policy: str, rate: float, share: float) -> Point:
    figures = {
        "goodput_share": share,
        "goodput_rps": rate * share,
        "ttft_p50_s": 0.1 * rate,
        "ttft_p99_s": 0.0,
        "hit_rate_of_ideal": share,
    }
    return Point(policy, rate, figures)


def test_the_sustained_rate_lies_between_the_loads_around_it() -> None:
    points = [point("a", 30.0, 0.5), point("a", 10.0, 1.0), point("a", 20.0, 0.95)]
    assert sustained(points, 0.9) == pytest.approx(20.0 + 10.0 * 0.05 / 0.45)
    assert sustained(points, 0.4) == 30.0
    assert sustained(points[:1], 0.9) == 0.0
    # What is sustained again beyond a load that was not does not count.
    assert sustained([*points, point("a", 40.0, 1.0)], 0.9) < 30.0


def test_the_plot_is_a_document_with_a_line_for_each_policy_in_each_panel() -> None:
    points = [point(policy, rate, 0.9) for policy in ("a", "b") for rate in (1.0, 2.0, 4.0)]
    document = ElementTree.fromstring(plot("t", points))
    assert len(document.findall(".//{*}polyline")) == 2 * 4
