"""Faults under a whole mesh while a prefix is being pulled: the answer is the undisturbed one, and hardly later.

The kvstore node is behind a link of its own, Redis is reached by path and not through it. The worker's cache holds one
prompt, so each request's prefix is at the node alone. What the greedy text must be is told by the same mesh before
anything was cached.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from services.common.keys import KeySpace, location_key
from services.common.redis_client import connect_redis
from tests.faults.transfers import STALL_LIMIT_S, Record, report
from tests.kvstore.conftest import KvStoreProcess
from tests.support.completions import Completion, complete
from tests.support.log_lines import log_events
from tests.support.mesh import Mesh, running_mesh, total, wait_for
from tests.support.netns import Island, island
from tests.support.valkey import Valkey

_PROMPTS = 3
_WORDS = 350
_TOKENS = 16
# One prompt and a little more.
_CACHE_MB = 40
_NODE_BYTES = 2**29
# The fault comes when so much of a prefix has arrived, and most of it has not.
_FAULT_AFTER_BYTES = 6 * 2**20
_BACK_WITHIN_S = 60.0
# A link that failed is tried again at once.
_ENVIRONMENT = {"KVMESH_WORKER_PULL_HALF_LIFE_S": "0.5"}


@dataclass
class Scene:
    """A mesh, its node behind a link, and what is known of the prompts."""

    mesh: Mesh
    link: Island
    valkey: Valkey
    node: KvStoreProcess
    revive: Callable[[], KvStoreProcess]
    cold: list[Completion] = field(default_factory=list)
    last: int = 0

    def ask(self, number: int) -> Completion:
        """One greedy completion."""
        return complete(self.mesh.url, number, _WORDS, _TOKENS, timeout_s=120, ignore_eos=True)

    def next_prompt(self) -> int:
        """The prompt that was asked longest ago: the worker has given it up."""
        self.last = (self.last + 1) % _PROMPTS
        return self.last

    def from_node(self) -> float:
        """Prompt tokens that came from a kvstore so far."""
        metrics = self.mesh.metrics("worker-0")
        return sum(total(metrics, "kvmesh_cached_prompt_tokens_total", tier=tier) for tier in ("ram", "ssd"))

    def pulls(self) -> list[dict[str, Any]]:
        """The ends of all pulls, as the worker logged them."""
        log = (self.mesh.state / "logs" / "worker-0.log").read_text()
        return [line for line in log_events(log) if line.get("event") == "pull ended"]

    def check_prefix_hits(self, share: float = 0.25) -> float:
        """Ask until this share of a prompt comes from the node; seconds. Every answer is right."""
        started_s = time.monotonic()
        while True:
            number, before = self.next_prompt(), self.from_node()
            answer = self.ask(number)
            assert answer.text == self.cold[number].text
            if self.from_node() - before > answer.prompt_tokens * share:
                return time.monotonic() - started_s
            assert time.monotonic() - started_s < _BACK_WITHIN_S, self.pulls()[-3:]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = Path(tempfile.mkdtemp(prefix="kvm-"))
    valkey = Valkey(folder)
    options = ("--kvstores", "0", "--workers", "1", "--kv-cache-mb", str(_CACHE_MB), "--redis", valkey.url)
    state = tmp_path_factory.mktemp("mesh")
    nodes: list[KvStoreProcess] = []
    try:
        with island() as link:
            valkey.start()
            with running_mesh(state, *options, env=_ENVIRONMENT) as mesh:

                def start_node() -> KvStoreProcess:
                    nodes.append(_start_node(folder, valkey, mesh, link))
                    return nodes[-1]

                made = Scene(mesh, link, valkey, start_node(), start_node)
                _warm_up(made)
                yield made
    finally:
        for node in nodes:
            node.end()
        valkey.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _start_node(folder: Path, valkey: Valkey, mesh: Mesh, link: Island) -> KvStoreProcess:
    secret = (mesh.state / "mesh_secret").read_text().strip()
    addresses = ("--listen", f"{link.address}:7001", "--pull-listen", f"{link.address}:7002")
    sizes = ("--ram-bytes", str(_NODE_BYTES), "--ssd-path", str(folder / "ssd"), "--ssd-bytes", str(_NODE_BYTES))
    return KvStoreProcess(folder, valkey.url, "auto", *addresses, *sizes, secret=secret, within=link.within)


def _warm_up(scene: Scene) -> None:
    """Every prompt once: the oracle. Then again until each comes from the node, as the worker has room for one only."""
    log = scene.mesh.state / "logs" / "worker-0.log"
    wait_for(lambda: '"kvstore_id": "kv-1"' in log.read_text(), within_s=60, what="a push target")
    scene.cold = [scene.ask(number) for number in range(_PROMPTS)]
    assert all(answer.cached_tokens < 32 for answer in scene.cold)
    scene.last = _PROMPTS - 1
    for _ in range(_PROMPTS):
        scene.check_prefix_hits(0.6)


@contextmanager
def disturbed(scene: Scene, fault: Callable[[], None]) -> Iterator[tuple[int, Future[Completion], float]]:
    """A request whose pull was under way when `fault` came: its prompt, its answer to come, and when that was."""
    number = scene.next_prompt()
    with ThreadPoolExecutor(1) as pool:
        before = scene.link.received_bytes
        answer = pool.submit(scene.ask, number)
        wait_for_bytes(scene.link, before + _FAULT_AFTER_BYTES)
        fault()
        yield number, answer, time.time()


def wait_for_bytes(link: Island, count: int) -> None:
    """Return as soon as so much has come."""
    until_s = time.monotonic() + 60
    while link.received_bytes < count:
        assert time.monotonic() < until_s, "nothing is pulled"
        time.sleep(0.001)


def _check_cut_pull(scene: Scene, number: int, answer: Completion, at_s: float, name: str, record: Record) -> None:
    """The pull had begun and did not end well, the text is right, and the pull took no time worth mentioning.

    extra_s, against the request that computed everything, varies with whatever else the machine does.
    """
    ended = scene.pulls()[-1]
    assert 0 < ended["pulled_blocks"] < ended["asked_blocks"], ended
    assert answer.text == scene.cold[number].text
    stall_s = _when_s(ended) - at_s
    extra_s = answer.seconds - scene.cold[number].seconds
    report(record, f"mesh, {name}, {ended['pulled_blocks']} blocks", stall_s=max(0.0, stall_s), extra_s=extra_s)
    assert stall_s < STALL_LIMIT_S
    assert ended["duration_s"] < STALL_LIMIT_S
    assert extra_s < STALL_LIMIT_S + scene.cold[number].seconds


def _when_s(line: dict[str, Any]) -> float:
    return datetime.fromisoformat(line["timestamp"]).astimezone(UTC).timestamp()


@pytest.mark.parametrize("name", ["drop", "drop_incoming", "drop_outgoing", "reset", "crawl"])
def test_the_link_fails_in_mid_pull(scene: Scene, name: str, record_property: Record) -> None:
    try:
        with disturbed(scene, getattr(scene.link, name)) as (number, future, at_s):
            answer = future.result(120)
    finally:
        scene.link.mend()
    _check_cut_pull(scene, number, answer, at_s, name, record_property)
    report(record_property, f"mesh, after {name}", back_s=scene.check_prefix_hits())


def test_requests_go_on_while_the_link_is_cut(scene: Scene, record_property: Record) -> None:
    """Each asks for blocks of a node that is still listed, and is right and hardly later for it."""
    before = len(scene.pulls())
    try:
        scene.link.drop()
        for _ in range(_PROMPTS):
            number = scene.next_prompt()
            assert scene.ask(number).text == scene.cold[number].text
    finally:
        scene.link.mend()
    tried = scene.pulls()[before:]
    assert tried, "nobody asked for blocks"
    assert all(pull["pulled_blocks"] == 0 for pull in tried)
    stall_s = max(pull["duration_s"] for pull in tried)
    report(record_property, f"mesh, cut, {len(tried)} pulls", stall_s=stall_s, back_s=scene.check_prefix_hits())
    assert stall_s < STALL_LIMIT_S


def test_the_node_is_stopped_in_mid_pull(scene: Scene, record_property: Record) -> None:
    try:
        with disturbed(scene, lambda: scene.node.process.send_signal(signal.SIGSTOP)) as (number, future, at_s):
            answer = future.result(120)
    finally:
        scene.node.process.send_signal(signal.SIGCONT)
    _check_cut_pull(scene, number, answer, at_s, "SIGSTOP", record_property)
    report(record_property, "mesh, after SIGSTOP", back_s=scene.check_prefix_hits())


def test_redis_is_lost_while_prefixes_are_pulled(scene: Scene, record_property: Record) -> None:
    """Routers go on from their replica; nobody's answer fails, and the node lists its blocks in the new Redis."""
    with disturbed(scene, scene.valkey.kill) as (number, future, at_s):
        answer = future.result(120)
    ended = scene.pulls()[-1]
    assert (ended["error"], ended["pulled_blocks"]) == ("", ended["asked_blocks"])
    assert _when_s(ended) > at_s, "the pull was over before Redis was lost"
    assert answer.text == scene.cold[number].text
    lost_s = scene.check_prefix_hits()
    scene.valkey.start()
    started_s = time.monotonic()
    while not _listed(scene.valkey):
        number = scene.next_prompt()
        assert scene.ask(number).text == scene.cold[number].text
        assert time.monotonic() - started_s < _BACK_WITHIN_S
    listed_s = time.monotonic() - started_s
    report(record_property, "mesh, Redis", hit_without_s=lost_s, listed_s=listed_s, back_s=scene.check_prefix_hits())


def test_the_node_is_killed_in_mid_pull(scene: Scene, record_property: Record) -> None:
    """It comes back at its address and serves what its SSD holds."""
    with disturbed(scene, lambda: scene.node.process.send_signal(signal.SIGKILL)) as (number, future, at_s):
        answer = future.result(120)
    _check_cut_pull(scene, number, answer, at_s, "SIGKILL", record_property)
    scene.node.process.wait(30)
    scene.node = scene.revive()
    report(record_property, "mesh, after SIGKILL", back_s=scene.check_prefix_hits())


def _listed(valkey: Valkey) -> int:
    """How many blocks of the node are in the index."""

    async def count() -> int:
        client = connect_redis(valkey.url)
        location = location_key("kvstore", "kv-1")
        try:
            return int(await client.hlen(KeySpace().shard_of(location).blocks(location)))
        finally:
            await client.aclose()

    return asyncio.run(count())
