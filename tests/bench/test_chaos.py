"""How answers under faults are judged, and who is struck."""

from __future__ import annotations

from typing import Any

import pytest

from bench.chaos import summary
from bench.chaos_faults import Fault, targets
from bench.chaos_jobs import KINDS, make_jobs
from bench.chaos_streams import Answer, Choice, difference, percentile, text_difference

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
    assert text_difference(text, TEXT) == expected


def test_percentiles() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([float(n) for n in range(200)], 0.99) == 198.0


def answer(text: str, start_s: float, end_s: float, error: str = "", **fields: Any) -> Answer:
    choices = {0: Choice(text, fields.pop("finish", "length"), fields.pop("logprobs", []))}
    return Answer(
        0, "greedy", choices, error=error, done=not error, events=9, pause_s=end_s - start_s,
        started_s=start_s, ended_s=end_s, **fields,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ""),
        ({"finish": "stop"}, "finish reason"),
        ({"logprobs": [["a", -0.5]]}, "logprobs"),
        ({"output_tokens": 8}, "usage"),
    ],
)
def test_answers_are_compared_whole(fields: dict[str, Any], expected: str) -> None:
    assert difference(answer(TEXT, 0, 1, **fields), answer(TEXT, 0, 1)) == expected
    two = answer(TEXT, 0, 1)
    two.choices[1] = Choice(TEXT)
    assert difference(answer(TEXT, 0, 1), two) == "other"


def test_a_summary_counts_what_faults_did() -> None:
    answers = [answer(TEXT, 0, 1), answer(TEXT, 2, 4), answer("", 2, 5, "broken"), answer(TEXT[:40] + TEXT[60:], 6, 7)]
    found = summary({0: answer(TEXT, 0, 0.5)}, answers, [Fault("kill", "worker-0", "engine", 3.0)])
    assert (found["streams"], found["complete"], found["streams_in_faults"]) == (4, 3, 2)
    assert (found["equal"], found["gaps"]) == (2, 1)
    assert found["errors"] == {"greedy: broken": 1}
    assert found["faults"] == {"kill engine": 1}
    assert found["pause_ms"]["in faults"] == {"p50": 3000.0, "p99": 3000.0}
    assert found["pause_ms"]["undisturbed"] == {"p50": 500.0, "p99": 500.0}


def test_jobs_are_of_all_kinds_and_differ() -> None:
    jobs = make_jobs(KINDS, 50, each=2)
    assert [job.number for job in jobs] == list(range(2 * len(KINDS)))
    assert len({str(job.body) for job in jobs}) == len(jobs)
    cut = jobs[0].stopping_in(TEXT)
    assert cut.body["stop"][0] in TEXT
    assert "stop" not in jobs[0].body


def process(name: str, kind: str, *, ready: bool = True, children: int = 0) -> dict[str, Any]:
    told = [{"role": f"part{number}", "pid": 100 + number} for number in range(children)]
    return {"name": name, "kind": kind, "pid": 1, "ready": ready, "address": "h:1", "children": told}


def test_what_is_there_once_is_not_struck() -> None:
    mesh = [process("w0", "worker", children=2), process("w1", "worker", ready=False), process("r0", "router")]
    assert targets(mesh, ("worker", "child", "router")) == {}
    mesh += [process("w2", "worker", children=1), process("r1", "router")]
    found = targets(mesh, ("worker", "child", "router"))
    assert {kind: len(some) for kind, some in found.items()} == {"worker": 2, "child": 3, "router": 2}
    assert [target.address for target in found["router"]] == ["", ""]
    assert set(targets(mesh, ("child",))) == {"child"}
