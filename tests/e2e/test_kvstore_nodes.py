"""Two kvstore nodes: what was copied outlives its node, the rest is computed again, and the text is the same."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.support.mesh import MODEL, Mesh, running_mesh, total, wait_for

_WORDS = 150
# Enough other prompts to push one out of the worker's pool.
_OTHERS = 6


@pytest.fixture(scope="module")
def nodes_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Over gRPC a puller on the same host counts as one of another host."""
    options = ("--workers", "1", "--kvstores", "2", "--kv-cache-mb", "64", "--kvstore-mb", "512")
    env = {"KVMESH_TRANSPORT": "grpc", "KVMESH_REPLICATE_LEASES": "2", "KVMESH_REPLICATE_WINDOW_S": "120"}
    with running_mesh(tmp_path_factory.mktemp("nodes"), *options, env=env) as running:
        yield running


def complete(mesh: Mesh, number: int) -> dict[str, Any]:
    """A greedy completion of a long prompt."""
    prompt = " ".join(f"word{(number * 7919 + i * 31) % 997}" for i in range(_WORDS))
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0}
    request = Request(f"{mesh.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(request, timeout=120) as response:
        answer: dict[str, Any] = json.loads(response.read())
    return answer


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def of_node(mesh: Mesh, name: str, metric: str) -> float:
    return total(mesh.metrics(name), f"kvmesh_kvstore_{metric}")


def kill(mesh: Mesh, name: str) -> None:
    """SIGKILL; the supervisor starts another one, which holds nothing."""
    before = mesh.process(name)["pid"]
    mesh.kill(name, signal.SIGKILL)
    wait_for(lambda: mesh.process(name)["pid"] not in (None, before), within_s=20, what="a new process")
    mesh.wait_ready()


def forget(mesh: Mesh, first: int) -> None:
    """Other prompts until the worker has given up what came before."""
    for number in range(first, first + _OTHERS):
        complete(mesh, number)


def test_a_copied_prefix_outlives_its_node_and_any_other_is_computed_again(nodes_mesh: Mesh) -> None:
    mesh = nodes_mesh
    names = ("kvstore-0", "kvstore-1")
    first = complete(mesh, 0)
    wait_for(lambda: any(of_node(mesh, n, "stored_blocks") > 25 for n in names), within_s=15, what="pushed")
    holder = max(names, key=lambda name: of_node(mesh, name, "stored_blocks"))
    other = next(name for name in names if name != holder)
    assert of_node(mesh, other, "stored_blocks") == 0
    for number in (1, 2):
        forget(mesh, 10 * number)
        again = complete(mesh, 0)
        assert text(again) == text(first)
        assert cached(again) > 400, "pulled from the node"
    wait_for(lambda: of_node(mesh, other, "replicated_blocks_total") >= 25, within_s=20, what="copied")

    hits = {name: of_node(mesh, name, "hit_blocks_total") for name in names}
    for number in range(4):
        forget(mesh, 200 + 10 * number)
        assert text(complete(mesh, 0)) == text(first)
    assert all(of_node(mesh, name, "hit_blocks_total") > hits[name] for name in names), "both serve"

    kill(mesh, holder)
    forget(mesh, 300)
    before = of_node(mesh, other, "hit_blocks_total")
    served = complete(mesh, 0)
    assert text(served) == text(first)
    assert cached(served) > 400
    assert of_node(mesh, other, "hit_blocks_total") - before >= 25

    lonely = complete(mesh, 50)
    for name in names:
        kill(mesh, name)
    forget(mesh, 400)
    computed = complete(mesh, 50)
    assert text(computed) == text(lonely)
    assert cached(computed) < 32


def test_each_node_has_a_place_of_its_own(nodes_mesh: Mesh) -> None:
    nodes = nodes_mesh.of_kind("kvstore")
    assert len({node["address"] for node in nodes}) == len({node["metrics"] for node in nodes}) == 2
    rows = json.loads(nodes_mesh._kvmesh("ctl", "kv", "stats", "--json").stdout)
    assert [row["kvstore_id"] for row in rows] == ["kvstore-0", "kvstore-1"]
    assert all("replication_replicated_blocks" in row for row in rows)
