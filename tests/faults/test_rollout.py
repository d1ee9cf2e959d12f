"""Under steady load: a canary, its rollback, a drain, killed routers, an emptied Redis. No request may fail."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import pytest

from services.cli.errors import CliError
from services.cli.state import StateDir
from tests.faults.test_kills import events
from tests.support.ctl import ctl
from tests.support.mesh import MODEL, Mesh
from tests.support.processes import clean_environment
from tests.support.sim_mesh import SIM_ENVIRONMENT, running_sim_mesh

CLIENTS = 6
CANARY = "canary"


@contextmanager
def canary(mesh: Mesh) -> Iterator[None]:
    """A worker that has another version of the model, started by hand."""
    secret, url = mesh.state / "mesh_secret", (mesh.state / "redis_url").read_text().strip()
    command = (sys.executable, "-m", "services.worker", "--engine", "sim", "--instance", CANARY)
    environment = clean_environment(**SIM_ENVIRONMENT, KVMESH_REDIS_URL=url, KVMESH_WORKER_REVISION="2")
    with (mesh.state / "logs" / "canary.log").open("w") as log:
        flags = ("--mesh-secret-file", str(secret), "--model", MODEL)
        process = subprocess.Popen([*command, *flags], env=environment, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    options = ("--workers", "3", "--routers", "2", "--gateways", "2")
    with running_sim_mesh(*options) as running, canary(running):
        yield running


@dataclass
class Load:
    """Clients that ask one request after another, and what became of each."""

    mesh: Mesh
    failures: list[str] = field(default_factory=list)
    workers: list[str] = field(default_factory=list)
    _asked: int = 0

    async def client(self) -> None:
        """Ask until cancelled."""
        while True:
            self._asked += 1
            await self._ask({"prompt": f"Story number {self._asked}:", "max_tokens": 4, "ignore_eos": True})

    async def _ask(self, body: dict[str, object]) -> None:
        worker, last = "", ""
        try:
            async with asyncio.timeout(60):
                async for headers, data in events(self.mesh, body):
                    worker, last = headers["x-kvmesh-worker"], data
                    assert headers["x-request-id"]
                    assert headers["x-kvmesh-cached-tokens"].isdecimal()
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            last = f"{type(error).__name__}: {error}"
        if last == "[DONE]":
            self.workers.append(worker)
        else:
            self.failures.append(last)

    async def served(self, count: int) -> Counter[str]:
        """Workers of the next `count` requests, those under way left out."""
        first = len(self.workers) + CLIENTS
        async with asyncio.timeout(60):
            while len(self.workers) < first + count and not self.failures:
                await asyncio.sleep(0.02)
        assert self.failures == []
        return Counter(self.workers[first : first + count])


@asynccontextmanager
async def load(mesh: Mesh) -> AsyncIterator[Load]:
    """Clients for the time of the block; those that are in the middle of a request at its end are let go."""
    running = Load(mesh)
    tasks = [asyncio.create_task(running.client()) for _ in range(CLIENTS)]
    try:
        yield running
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [result for result in results if not isinstance(result, asyncio.CancelledError)] == []
    assert running.failures == []


async def until(condition: Callable[[], Awaitable[bool]], within_s: float = 90.0) -> None:
    async with asyncio.timeout(within_s):
        while not await condition():
            await asyncio.sleep(0.05)


async def replace(mesh: Mesh, name: str) -> None:
    """Kill a process, and wait until the supervisor has another one ready."""
    state = StateDir(mesh.state)

    def pid() -> int | None:
        found = next(one["pid"] for one in state.snapshot()["processes"] if one["name"] == name)
        assert found is None or isinstance(found, int)
        return found

    async def is_back() -> bool:
        return pid() not in (None, before) and (name == "valkey" or state.ready_file(name).exists())

    before = pid()
    assert before is not None
    state.ready_file(name).unlink(missing_ok=True)
    os.kill(before, signal.SIGKILL)
    await until(is_back)


async def versions(mesh: Mesh) -> dict[str, int]:
    """Weights by label."""
    return {one["version"]: one["weight"] for one in await ctl(mesh, "traffic", MODEL) if "version" in one}


async def register_versions(mesh: Mesh) -> None:
    """What three workers have is v1 and has all traffic; what the canary has is v2."""

    async def all_are_there() -> bool:
        replicas = Counter({one["digest"]: one["ready_replicas"] for one in await ctl(mesh, "models")})
        return sorted(replicas.values()) == [1, 3]

    await until(all_are_there)
    by_replicas = {one["ready_replicas"]: one["digest"] for one in await ctl(mesh, "models")}
    await ctl(mesh, "register", MODEL, by_replicas[3], "--version", "v1")
    await ctl(mesh, "traffic", MODEL, "v1=100")
    await ctl(mesh, "register", MODEL, by_replicas[1][:8], "--version", "v2")


async def test_nothing_fails_in_a_rollout_a_drain_and_losses(mesh: Mesh) -> None:
    await register_versions(mesh)
    async with load(mesh) as running:
        assert (await running.served(20))[CANARY] == 0
        await ctl(mesh, "traffic", MODEL, "v1=90", "v2=10")
        assert 0 < (await running.served(120))[CANARY] < 30
        await ctl(mesh, "traffic", MODEL, "v1=50", "v2=50")
        assert 36 < (await running.served(120))[CANARY] < 84
        await ctl(mesh, "rollback", MODEL)
        # Those that were on their way when the gateways heard of it.
        await running.served(4 * CLIENTS)
        assert (await running.served(40))[CANARY] == 0

        (drained,) = await ctl(mesh, "drain", "worker-1", "--wait-s", "30")
        assert (drained["drained"], drained["running_requests"]) == (True, 0)
        assert set(await running.served(40)) == {"worker-0", "worker-2"}
        for name in ("router-0", "router-1", "valkey"):
            await replace(mesh, name)
            assert set(await running.served(40)) == {"worker-0", "worker-2"}
        assert await versions(mesh) == {"v1": 100, "v2": 0}
        await ctl(mesh, "undrain", "worker-1")
        assert (await running.served(60))["worker-1"] > 0


async def test_a_request_is_explained_by_the_router_that_decided(mesh: Mesh) -> None:
    async for headers, _data in events(mesh, {"prompt": "Why there?", "max_tokens": 4, "ignore_eos": True}):
        seen = headers

    async def ended() -> bool:
        try:
            return bool((await ctl(mesh, "explain", seen["x-request-id"]))[0]["outcome"])
        except CliError:
            return False

    await until(ended)
    (record,) = await ctl(mesh, "explain", seen["x-request-id"])
    assert (record["worker_id"], record["outcome"]) == (seen["x-kvmesh-worker"], "ok")
    assert record["num_candidates"] == len(record["candidates"])
    assert record["ttft_s"] > 0
    assert record["predicted_ttft_s"] > 0
