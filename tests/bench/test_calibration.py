"""What the calibration bench makes of a router's log."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path

import pytest

from bench.calibration import _samples, errors_of, prompts
from bench.load import FIRST_TOKEN_ID


def line(**fields: object) -> str:
    entry = {"event": "attempt closed", "outcome": "ok", "predicted_ttft_s": 0.1, "uncorrected_ttft_s": 0.2,
             "actual_ttft_s": 0.2, "predicted_tpot_s": 0.01, "actual_tpot_s": 0.02, "queue_s": 0.0}  # fmt: skip
    return json.dumps(entry | fields)


def test_errors_are_relative_to_what_was_measured(tmp_path: Path) -> None:
    lines = [
        line(),
        line(predicted_ttft_s=0.3),
        line(outcome="cancelled"),
        line(event="granted"),
        line(actual_ttft_s=0),
    ]
    (tmp_path / "router-0.log").write_text("\n".join(lines))
    errors = errors_of("all", _samples(tmp_path))
    assert (errors.requests, errors.ttft_p50, errors.uncorrected_p50) == (2, pytest.approx(0.5), pytest.approx(0.0))
    assert errors.ttft_bias == pytest.approx(1.0)
    assert errors.tpot_p50 == pytest.approx(0.5)


def test_prompts_are_of_all_lengths_and_two_in_three_share_a_beginning() -> None:
    some = list(islice(prompts(random.Random(1)), 300))
    assert all(32 <= len(prompt) <= 1500 and min(prompt) >= FIRST_TOKEN_ID for prompt in some)
    beginnings = [tuple(prompt[:32]) for prompt in some]
    assert 0.55 < sum(beginnings.count(one) > 1 for one in beginnings) / 300 < 0.8
