"""`kvmesh ctl rollout --model` under steady load: a broken version never meets a client, a good one replaces the old.

The broken model is the served one with the weights of its layers in another order: every number in it is a weight.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

from services.cli.canary_options import canary_options
from services.cli.canary_plan import CANARY
from services.cli.errors import CliError
from services.cli.requests import command
from services.cli.state import StateDir
from services.common.models import DEFAULT_MODEL, resolve_model
from tests.faults import test_rollout
from tests.faults.test_rollout import Load, load, until
from tests.support.ctl import ctl
from tests.support.mesh import Mesh, running_mesh
from tests.support.sim_mesh import running_sim_mesh

# Longest time between two lines of a rollout: processes start on the same cores as the load.
SILENCE_S = 900.0
# Of times nothing is demanded here.
ANY_LATENCY = 1e6
# A canary that is watched until something happens.
ENDLESS = {"worker_flags": "--num-blocks 1999", "share": 50, "analysis_s": 600, "analysis_requests": 10**6}


@pytest.fixture(autouse=True)
def few_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_rollout, "CLIENTS", 2)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with running_sim_mesh("--workers", "2") as running:
        yield running


def broken_model(folder: Path) -> Path:
    """The default model, its layers' output projections in reverse order."""
    source = resolve_model(DEFAULT_MODEL).path
    tensors = [tensor for tensor in GGUFReader(source).tensors if tensor.name.endswith("ffn_down.weight")]
    data = bytearray(source.read_bytes())
    places = [slice(int(tensor.data_offset), int(tensor.data_offset + tensor.n_bytes)) for tensor in tensors]
    for place, weights in zip(places, [bytes(data[place]) for place in reversed(places)], strict=True):
        data[place] = weights
    broken = folder / "broken.gguf"
    broken.write_bytes(data)
    return broken


class Rollout:
    """One rollout by a person who watches, and how many requests had been served at each line."""

    def __init__(self, mesh: Mesh, running: Load, **options: Any) -> None:
        self.lines: list[str] = []
        self._state = StateDir(mesh.state)
        self._running = running
        self._served: list[int] = []
        self._asked = canary_options({"latency_tolerance": ANY_LATENCY, **options}).model_dump()

    async def run(self, at: str = "", act: Any = None) -> None:
        """Raises CliError. act: called at the first line with `at` in it."""

        def told(line: str) -> None:
            self.lines.append(line)
            self._served.append(len(self._running.workers))
            if at and at in line:
                act()

        asked = {"command": "rollout", "canary": self._asked}
        await asyncio.to_thread(command, self._state, asked, told, SILENCE_S)

    def workers_until(self, part: str) -> list[str]:
        """Of the requests that had ended at the first line with `part` in it."""
        at = next(at for at, line in enumerate(self.lines) if part in line)
        return self._running.workers[: self._served[at]]


async def pids(mesh: Mesh) -> dict[str, int]:
    return {one["name"]: one["pid"] for one in await asyncio.to_thread(mesh.ps)}


async def assert_untouched(mesh: Mesh, before: dict[str, int], versions: list[dict[str, Any]]) -> None:
    """The processes from before, and no trace of another version."""

    async def is_as_before() -> bool:
        return await pids(mesh) == before and await ctl(mesh, "models") == versions

    await until(is_as_before, 300.0)


async def test_a_broken_model_meets_no_client(tmp_path: Path) -> None:
    broken = str(broken_model(tmp_path))
    options = ("--workers", "1", "--kvstores", "0", "--kv-cache-mb", "64", "--start-timeout-s", str(SILENCE_S))
    with running_mesh(tmp_path / "mesh", *options) as mesh:
        before, versions = await pids(mesh), await ctl(mesh, "models")
        async with load(mesh) as running:
            await running.served(2)
            rollout = Rollout(mesh, running, model=broken, version="broken")
            with pytest.raises(CliError, match=r"rolled back: quality: .* nats a token"):
                await rollout.run()
            await running.served(2)
            assert CANARY not in running.workers
        await assert_untouched(mesh, before, versions)
        assert "version broken is rolled back: quality" in mesh.logs()


async def test_a_canary_that_dies_is_rolled_back(mesh: Mesh) -> None:
    before, versions = await pids(mesh), await ctl(mesh, "models")
    async with load(mesh) as running:
        rollout = Rollout(mesh, running, **ENDLESS)
        with pytest.raises(CliError, match=r"rolled back: .*ended"):
            await rollout.run("gets 50 %", lambda: os.kill(mesh.process(CANARY)["pid"], signal.SIGKILL))
        # What it had begun has nobody else with its version.
        assert len(running.failures) <= test_rollout.CLIENTS
        running.failures.clear()
        assert CANARY not in await running.served(20)
    await assert_untouched(mesh, before, versions)


async def test_an_interrupted_rollout_is_rolled_back(mesh: Mesh) -> None:
    before, versions = await pids(mesh), await ctl(mesh, "models")

    def interrupt() -> None:
        raise KeyboardInterrupt

    async with load(mesh) as running:
        rollout = Rollout(mesh, running, **ENDLESS)
        with pytest.raises(KeyboardInterrupt):
            await rollout.run("gets 50 %", interrupt)
        await assert_untouched(mesh, before, versions)
        assert CANARY not in await running.served(20)


async def test_a_good_version_replaces_every_worker(mesh: Mesh) -> None:
    before = await pids(mesh)
    async with load(mesh) as running:
        rollout = Rollout(mesh, running, model=DEFAULT_MODEL, version="good", share=10, analysis_requests=8)
        await running.served(10)
        await rollout.run()
        await running.served(20)
        assert CANARY not in rollout.workers_until("probes pass")
        shared = rollout.workers_until("traffic passes")[len(rollout.workers_until("probes pass")) :]
        assert 0 < shared.count(CANARY) <= 0.4 * len(shared)
    after = await pids(mesh)
    assert {name for name in before if after[name] != before[name]} == {"worker-0", "worker-1"}
    assert after.keys() == before.keys()
    (version,) = await ctl(mesh, "models")
    assert (version["version"], version["ready_replicas"], "weight" in version) == ("good", 2, False)
