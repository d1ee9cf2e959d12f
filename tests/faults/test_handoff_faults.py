"""Random faults of handoffs and moves on real processes, as `bench.handoff_faults` makes them, but few."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.processes import clean_environment

FAULTS = 6


def test_random_faults_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = (sys.executable, "-m", "bench.handoff_faults", "--faults", str(FAULTS), "--json", str(result))
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=900, check=False)
    assert result.exists(), done.stderr[-4000:]
    found = json.loads(result.read_text())
    print(json.dumps(found, indent=1))
    assert (found["wrong"], found["leaks"]) == ([], [])
    assert found["faults"] == FAULTS
    assert found["complete_and_equal"] + found["ended_by_client"] == 8 * FAULTS
    assert found["handoffs"]["started"] > 0
    assert done.returncode == 0
