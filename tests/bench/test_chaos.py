"""How answers under faults are judged."""

from __future__ import annotations

import pytest

from bench.chaos import summary
from bench.chaos_faults import Fault
from bench.chaos_streams import Answer, difference, percentile

TEXT = "The river ran past the old garden and the stone wall, then it turned to the town."


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TEXT, ""),
        (TEXT[:40] + TEXT[20:], "duplicate"),
        (TEXT[:40] + TEXT[60:], "gap"),
        (TEXT[:40] + "something that nobody has said", "other"),
        (TEXT[:40], "other"),
    ],
)
def test_how_a_text_differs(text: str, expected: str) -> None:
    assert difference(text, TEXT) == expected


def test_percentiles() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([float(n) for n in range(200)], 0.99) == 198.0


def answer(text: str, start_s: float, end_s: float, error: str = "") -> Answer:
    return Answer(0, text, error, not error, 9, pause_s=end_s - start_s, started_s=start_s, ended_s=end_s)


def test_a_summary_counts_what_faults_did() -> None:
    answers = [answer(TEXT, 0, 1), answer(TEXT, 2, 4), answer("", 2, 5, "broken"), answer(TEXT[:40] + TEXT[60:], 6, 7)]
    found = summary([answer(TEXT, 0, 0.5)], answers, [Fault("kill", "worker-0", "engine", 3.0)])
    assert (found["streams"], found["streams_in_faults"], found["equal"], found["gaps"]) == (4, 2, 2, 1)
    assert found["errors"] == {"broken": 1}
    assert found["faults"] == {"kill engine": 1}
    assert found["pause_ms"]["in faults"] == {"p50": 3000.0, "p99": 3000.0}
    assert found["pause_ms"]["undisturbed"] == {"p50": 500.0, "p99": 500.0}
