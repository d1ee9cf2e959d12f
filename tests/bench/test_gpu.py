"""The GPU script: without a GPU it says so; on tiny shapes in the interpreter it runs whole and finds kernels right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu import NO_GPU, show

ROOT = Path(__file__).resolve().parents[2]


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.gpu", *flags]
    return subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=400, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    ended = run()
    assert ended.returncode == NO_GPU
    assert "no GPU here" in ended.stderr
    assert ended.stdout == ""


def test_every_case_runs_interpreted_and_every_kernel_is_right(tmp_path: Path) -> None:
    ended = run("--cpu-check", "--out", str(tmp_path / "result.json"))
    result = json.loads((tmp_path / "result.json").read_text())
    wrong = [row for row in result["rows"] if row.get("error")]
    assert wrong == []
    assert ended.returncode == 0, ended.stderr
    names = " ".join(row["name"] for row in result["rows"])
    for part in (
        "check sampling",
        "attention decode",
        "attention prefill",
        "linear int4",
        "step decode",
        "step prefill",
    ):
        assert part in names
    assert result["limits"]["copy_bytes_per_s"] > 0


def test_a_failure_and_a_missed_target_are_told_apart() -> None:
    missed = {"name": "a", "milliseconds": 1.0, "figure": "5 GB/s", "limit": "copy", "ratio": 0.5, "target": 0.8}
    assert "target >= 0.8, MISSED" in show({**missed, "at_most": False, "meets": False})
    assert "FAILED  it broke" in show({"name": "a", "error": "it broke"})
