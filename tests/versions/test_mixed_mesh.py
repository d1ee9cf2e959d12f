"""The release before this one and this one in one mesh: every kind of service in both, each with the others' peers.

The gateway of the old release has a router of the new one and the other way round; both have both workers. Supervisor,
command line and Envoy's configuration are of the old release, as they are when a mesh is upgraded in place.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import pytest_asyncio

from services.cli.listing import list_processes
from services.cli.state import StateDir
from services.common.release import RELEASE
from tests.faults.test_idempotency import Seen, read
from tests.faults.test_kills import events
from tests.support.mesh import Mesh, scrape, total, wait_for
from tests.support.sim_mesh import running_sim_mesh
from tests.support.waiting import eventually
from tests.versions.releases import Releases, old_tree

pytestmark = pytest.mark.asyncio(loop_scope="module")
OLD = ("router-1", "gateway-0", "worker-0")
NEW = ("router-0", "gateway-1", "worker-1")
STREAMS, TOKENS = 12, 120
# On a busy machine answers may be complete before anything happens to them.
ROUNDS = 4


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    releases = Releases(tmp_path_factory.mktemp("releases"), old_tree(tmp_path_factory.mktemp("old")))
    releases.to_old(("", *OLD))
    options = ("--workers", "2", "--routers", "2", "--gateways", "2")
    with running_sim_mesh(*options, env=releases.env | {"KVMESH_GATEWAY_IDEMPOTENCY_WINDOW_S": "60"}) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def texts(mesh: Mesh) -> list[str]:
    """What the streams say undisturbed."""
    return await streams(mesh)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(mesh: Mesh) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


async def stream(mesh: Mesh, number: int, started: set[int]) -> str:
    """The text of one answer; `number` is in `started` from its first token on."""
    body = {"prompt": f"Story number {number}:", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0}
    text, last = "", ""
    async with asyncio.timeout(90):
        async for _headers, last in events(mesh, {**body, "seed": number}):
            if last != "[DONE]":
                text += json.loads(last)["choices"][0]["text"]
                started.add(number)
    assert last == "[DONE]"
    return text


@dataclass(frozen=True)
class View:
    """What processes say of themselves, seen by this release without a command, which would take a second."""

    state: StateDir

    async def ps(self) -> dict[str, dict[str, Any]]:
        return {entry["name"]: entry for entry in await list_processes(self.state)}

    async def pid(self, name: str) -> int:
        """Of one process, once all are ready."""
        async with asyncio.timeout(60):
            while True:
                found = await self.ps()
                if all(entry["ready"] for entry in found.values()):
                    return int(found[name]["pid"])
                await asyncio.sleep(0.1)

    def of(self, name: str, metric: str, **labels: str) -> float:
        metrics = next(one["metrics"] for one in self.state.snapshot()["processes"] if one["name"] == name)
        return total(scrape(metrics), metric, **labels)

    def gateways(self, metric: str, **labels: str) -> float:
        return self.of("gateway-0", metric, **labels) + self.of("gateway-1", metric, **labels)


@pytest.fixture(scope="module")
def view(mesh: Mesh) -> View:
    return View(StateDir(mesh.state))


async def streams(mesh: Mesh, started: set[int] | None = None) -> list[str]:
    """The texts of all streams at once."""
    started = set() if started is None else started
    return list(await asyncio.gather(*(stream(mesh, number, started) for number in range(STREAMS))))


async def test_every_process_has_work(mesh: Mesh, view: View, texts: list[str]) -> None:
    assert len(set(texts)) == STREAMS
    releases = {name: entry["release"] for name, entry in (await view.ps()).items()}
    assert releases == {**dict.fromkeys(OLD, ""), **dict.fromkeys(NEW, RELEASE), "valkey": "", "envoy": ""}
    assert view.of("router-0", "kvmesh_build_info", release=RELEASE) == 1

    def work() -> list[float]:
        news = [view.of(f"router-{i}", "kvmesh_router_news_received_total", outcome="taken") for i in range(2)]
        answers = [view.of(f"gateway-{i}", "kvmesh_ttft_seconds_count") for i in range(2)]
        return news + answers + [view.of(f"worker-{i}", "kvmesh_prompt_tokens_total") for i in range(2)]

    for _ in range(ROUNDS):
        if all(work()):
            break
        assert await streams(mesh) == texts
    assert all(work()), work()
    for router in ("router-0", "router-1"):
        assert view.of(router, "kvmesh_router_news_received_total", outcome="not_understood") == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["move", "rescue"])
@pytest.mark.parametrize("victim", ["worker-0", "worker-1"], ids=["old to new", "new to old"])
async def test_streams_go_on_at_the_other_release(
    mesh: Mesh, view: View, texts: list[str], victim: str, number: signal.Signals
) -> None:
    metric, labels = ("moves", {"outcome": "moved"}) if number == signal.SIGTERM else ("rescues", {})

    def count() -> float:
        return view.gateways(f"kvmesh_gateway_{metric}_total", **labels)

    before = count()
    for _ in range(ROUNDS):
        pid, started = await view.pid(victim), set[int]()
        answers = asyncio.create_task(streams(mesh, started))
        await eventually(lambda began=started, done=answers.done: len(began) == STREAMS or done(), timeout_s=60)
        os.kill(pid, number)
        assert await answers == texts
        if count() > before:
            return
    raise AssertionError("streams have ended before anything happened to them, each time")


async def interrupted(view: View, client: openai.AsyncOpenAI, gateway: str, name: str) -> tuple[str, Seen]:
    """A keyed request that this gateway was in the middle of when it was killed. Envoy chooses who gets one."""
    for attempt in range(4 * ROUNDS):
        pid, key, seen = await view.pid(gateway), f"{gateway} {name} {attempt}", Seen()
        reading = asyncio.create_task(read(client, key, seen, max_tokens=2 * TOKENS))
        await eventually(lambda one=seen, done=reading.done: len(one.text) > 20 or done(), timeout_s=60)
        if view.of(gateway, "kvmesh_gateway_inflight_requests"):
            os.kill(pid, signal.SIGKILL)
        await reading
        if seen.broken:
            return key, seen
    raise AssertionError(f"{gateway} got none of the requests")


@pytest.mark.parametrize("victim", ["gateway-0", "gateway-1"], ids=["old to new", "new to old"])
async def test_a_client_comes_back_by_the_other_release(view: View, client: openai.AsyncOpenAI, victim: str) -> None:
    for number in range(ROUNDS):
        key, first = await interrupted(view, client, victim, str(number))
        second = await read(client, key, Seen(), max_tokens=2 * TOKENS)
        assert (second.broken, second.output_tokens) == (False, 2 * TOKENS)
        if second.headers.get("x-kvmesh-replayed") == "true":
            assert (second.id, second.text[: len(first.text)]) == (first.id, first.text)
            return
    raise AssertionError("no key was known to the other gateway")


async def test_what_operators_set_applies_in_both(mesh: Mesh, view: View) -> None:
    def drained() -> list[float]:
        return [view.of(name, "kvmesh_router_drained_workers") for name in ("router-0", "router-1")]

    mesh.kvmesh("ctl", "drain", "worker-0")
    wait_for(lambda: drained() == [1, 1], within_s=60, what="drained in both releases")
    mesh.kvmesh("ctl", "undrain", "worker-0")
    wait_for(lambda: drained() == [0, 0], within_s=60, what="back in both releases")
