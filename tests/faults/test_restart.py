"""`kvmesh ctl rollout` under steady load: every process is another one afterwards, and requests are served throughout.

On a busy machine some are not: one that reaches a gateway in the moment in which it stops listening is cancelled.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator

import pytest

from services.cli.errors import CliError
from services.cli.requests import command
from services.cli.rollout import ORDER
from services.cli.state import StateDir
from tests.faults import test_rollout
from tests.faults.test_rollout import load
from tests.support.mesh import Mesh
from tests.support.sim_mesh import running_sim_mesh


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    with running_sim_mesh("--workers", "2", "--routers", "2", "--gateways", "2") as running:
        yield running


def pids(mesh: Mesh) -> dict[str, int]:
    return {entry["name"]: entry["pid"] for entry in mesh.ps()}


async def test_everything_is_replaced_under_load(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    # Processes start on the same cores.
    monkeypatch.setattr(test_rollout, "CLIENTS", 2)
    before, lines = pids(mesh), list[str]()
    async with load(mesh) as running:
        await running.served(20)
        asked = {"command": "rollout", "interrupt": False}
        await asyncio.to_thread(command, StateDir(mesh.state), asked, lines.append, 120.0)
        served, failed = len(running.workers), len(running.failures)
        print(f"{served} requests served, {failed} failed")
        assert served > 5 * failed
        running.failures.clear()
    after = pids(mesh)
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} == {
        entry["name"] for entry in mesh.ps() if entry["kind"] in ORDER
    }
    assert all(entry["restarts"] == 0 and entry["ready"] for entry in mesh.ps()), "asked for, not a crash"
    assert lines[-1] == "the rollout is complete"
    assert len(lines) == 7


def test_the_only_one_of_its_kind_stays() -> None:
    with running_sim_mesh("--workers", "1") as mesh:
        before = pids(mesh)
        with pytest.raises(subprocess.CalledProcessError) as caught:
            mesh.kvmesh("ctl", "rollout")
        assert "there is only one router" in caught.value.stderr
        with pytest.raises(CliError, match="not a command"):
            command(StateDir(mesh.state), {"command": "dance"}, print, 10)
        assert pids(mesh) == before
        mesh.kvmesh("ctl", "rollout", "--interrupt")
        after = pids(mesh)
        assert all((after[name] != before[name]) == (name not in ("valkey", "envoy")) for name in after)
