"""`kvmesh ctl rollout` under steady load: every process is another one afterwards, and no request fails meanwhile."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator

import pytest

from services.cli.errors import CliError
from services.cli.requests import command
from services.cli.state import StateDir
from tests.envoy.http_client import request
from tests.faults import test_rollout
from tests.faults.test_kills import events
from tests.faults.test_rollout import load
from tests.support.mesh import MODEL, Mesh
from tests.support.sim_mesh import running_sim_mesh


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    with running_sim_mesh("--workers", "2", "--routers", "2", "--gateways", "2") as running:
        yield running


def pids(mesh: Mesh) -> dict[str, int]:
    return {entry["name"]: entry["pid"] for entry in mesh.ps()}


async def keep_streaming(mesh: Mesh, stop: asyncio.Event, ends: list[str]) -> None:
    """Streams of several seconds, one after another, so that one is open at any moment; the last event of each."""
    while not stop.is_set():
        last = ""
        async with asyncio.timeout(120):
            async for _, data in events(mesh, {"prompt": "A long story:", "max_tokens": 500, "ignore_eos": True}):
                last = data
        ends.append(last)


async def keyed(mesh: Mesh) -> str:
    """The answer to a request with an idempotency key; also a worker that has not begun it draws the same tokens."""
    key, body = {"idempotency-key": "the same"}, {"model": MODEL, "prompt": "Once", "max_tokens": 8, "temperature": 1}
    async with request(mesh.port, "POST", "/v1/completions", json.dumps(body).encode(), key) as response:
        assert response.status == 200
        return str(json.loads(await response.body())["choices"][0]["text"])


async def test_everything_is_replaced_under_load(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    # Processes start on the same cores.
    monkeypatch.setattr(test_rollout, "CLIENTS", 2)
    before, lines, ends = pids(mesh), list[str](), list[str]()
    stop = asyncio.Event()
    text = await keyed(mesh)
    async with load(mesh) as running, asyncio.TaskGroup() as group:
        group.create_task(keep_streaming(mesh, stop, ends))
        await running.served(20)
        asked = {"command": "rollout", "interrupt": False}
        await asyncio.to_thread(command, StateDir(mesh.state), asked, lines.append, 300.0)
        stop.set()
        print(f"{len(running.workers)} requests served, {len(running.failures)} failed, {len(ends)} long streams")
        assert running.failures == []
    assert set(ends) == {"[DONE]"}
    assert await keyed(mesh) == text
    after = pids(mesh)
    assert after.keys() == before.keys()
    assert all(after[name] not in (None, before[name]) for name in after)
    assert all(entry["restarts"] == 0 and entry["ready"] for entry in mesh.ps()), "asked for, not a crash"
    assert lines[-1] == "the rollout is complete"
    assert len(lines) == 1 + len(before)


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
        assert all(after[name] not in (None, before[name]) for name in after)
