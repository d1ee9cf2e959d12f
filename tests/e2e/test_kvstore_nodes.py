"""Two kvstore nodes: what was copied outlives its node, the rest is computed again, and the text is the same."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.completions import Completion, complete
from tests.support.mesh import Mesh, running_mesh, total, wait_for

_WORDS = 150
# Enough other prompts of 37 blocks to push one out of the worker's pool, which has 88.
_OTHERS = 3
# Which node is asked is the router's affair: of so many pulls both get one.
_PULLS = 20
# A tenth of a second apart: much longer than a push takes.
_STILL_LOOKS = 30


@pytest.fixture(scope="module")
def nodes_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Over gRPC a puller on the same host counts as one of another host."""
    options = ("--workers", "1", "--kvstores", "2", "--kv-cache-mb", "32", "--kvstore-mb", "512")
    env = {"KVMESH_TRANSPORT": "grpc", "KVMESH_REPLICATE_LEASES": "2", "KVMESH_REPLICATE_WINDOW_S": "120"}
    with running_mesh(tmp_path_factory.mktemp("nodes"), *options, env=env) as running:
        yield running


def ask(mesh: Mesh, number: int) -> Completion:
    return complete(mesh.url, number, _WORDS, 8)


def of_node(mesh: Mesh, name: str, metric: str) -> float:
    return total(mesh.metrics(name), f"kvmesh_kvstore_{metric}")


def settle(mesh: Mesh, names: tuple[str, ...]) -> float:
    """Wait until the nodes get nothing more of what was computed; the blocks that they have."""
    seen: list[float] = []

    def is_still() -> bool:
        seen.append(sum(of_node(mesh, name, "stored_blocks") for name in names))
        return len(seen) > _STILL_LOOKS and len(set(seen[-_STILL_LOOKS:])) == 1

    wait_for(is_still, within_s=60, what="no more pushes")
    return seen[-1]


def forget(mesh: Mesh, first: int) -> None:
    """Other prompts until the worker has given up what came before."""
    for number in range(first, first + _OTHERS):
        ask(mesh, number)


def test_a_copied_prefix_outlives_its_node_and_any_other_is_computed_again(nodes_mesh: Mesh) -> None:
    mesh = nodes_mesh
    names = ("kvstore-0", "kvstore-1")
    first = ask(mesh, 0)
    wait_for(lambda: any(of_node(mesh, n, "stored_blocks") > 25 for n in names), within_s=60, what="pushed")
    holder = max(names, key=lambda name: of_node(mesh, name, "stored_blocks"))
    other = next(name for name in names if name != holder)
    assert of_node(mesh, other, "stored_blocks") == 0
    for number in (1, 2):
        forget(mesh, 10 * number)
        again = ask(mesh, 0)
        assert again.text == first.text
        assert again.cached_tokens > 400, "pulled from the node"
    wait_for(lambda: of_node(mesh, other, "replicated_blocks_total") >= 25, within_s=60, what="copied")

    hits = {name: of_node(mesh, name, "hit_blocks_total") for name in names}
    for number in range(_PULLS):
        forget(mesh, 200 + 10 * number)
        assert ask(mesh, 0).text == first.text
        if all(of_node(mesh, name, "hit_blocks_total") > hits[name] for name in names):
            break
    else:
        raise AssertionError("one of the nodes serves nothing")

    mesh.replace(holder)
    forget(mesh, 500)
    before = of_node(mesh, other, "hit_blocks_total")
    served = ask(mesh, 0)
    assert served.text == first.text
    assert served.cached_tokens > 400
    assert of_node(mesh, other, "hit_blocks_total") - before >= 25

    # All of a new prompt, and none of those before it.
    stored = settle(mesh, names)
    lonely = ask(mesh, 50)
    # What comes later goes to a node that is not replaced any more.
    wait_for(
        lambda: sum(of_node(mesh, name, "stored_blocks") for name in names) > stored + 25, within_s=60, what="pushed"
    )
    for name in names:
        mesh.replace(name)
    forget(mesh, 600)
    computed = ask(mesh, 50)
    assert computed.text == lonely.text
    assert computed.cached_tokens < 32


def test_each_node_has_a_place_of_its_own(nodes_mesh: Mesh) -> None:
    nodes = nodes_mesh.of_kind("kvstore")
    assert len({node["address"] for node in nodes}) == len({node["metrics"] for node in nodes}) == 2
    rows = json.loads(nodes_mesh.kvmesh("ctl", "kv", "stats", "--json").stdout)
    assert [row["kvstore_id"] for row in rows] == ["kvstore-0", "kvstore-1"]
    assert all("replication_replicated_blocks" in row for row in rows)
