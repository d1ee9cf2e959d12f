"""A real worker that stands aside while it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.common.session_niceness import session_niceness
from tests.support.processes import clean_environment
from tests.support.valkey import Valkey
from tests.support.waiting import eventually
from tests.worker.replica import SECRET, START_TIMEOUT_S

NICENESS = 10


@pytest.mark.skipif(session_niceness() is None, reason="this kernel does not share the processor among sessions")
async def test_a_worker_stands_aside_until_it_has_its_model(tmp_path: Path, valkey: Valkey) -> None:
    ready_file = tmp_path / "ready.json"
    flags = ("--redis-url", valkey.url, "--ready-file", str(ready_file), "--threads", "1", "--num-blocks", "256")
    command = (sys.executable, "-m", "services.worker", *flags, "--start-niceness", str(NICENESS))
    process = subprocess.Popen(command, env=clean_environment(KVMESH_MESH_SECRET=SECRET), start_new_session=True)
    try:
        await eventually(lambda: niceness_of(process.pid) == NICENESS, START_TIMEOUT_S)
        await eventually(ready_file.exists, START_TIMEOUT_S)
        assert niceness_of(process.pid) == 0
    finally:
        process.kill()
        process.wait(30)


def niceness_of(pid: int) -> int:
    """Of a process's session."""
    return int(Path(f"/proc/{pid}/autogroup").read_text().split()[-1])
