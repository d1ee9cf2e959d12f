"""A prefix that worker and RAM have given up comes back from the SSD, also after the node was killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.completions import Completion, complete
from tests.support.mesh import Mesh, running_mesh, total, wait_for

_WORDS = 150
# Enough others of 37 blocks to push one out of the worker's pool and of the node's RAM, which have 88 each.
_OTHERS = 3


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    options = ("--workers", "1", "--kvstores", "1", "--kv-cache-mb", "32", "--kvstore-mb", "32")
    with running_mesh(tmp_path_factory.mktemp("mesh"), *options, "--kvstore-ssd-mb", "512") as running:
        yield running


def ask(mesh: Mesh, number: int) -> Completion:
    return complete(mesh.url, number, _WORDS, 12)


def ssd_tokens(mesh: Mesh) -> float:
    """Prompt tokens that came from the SSD."""
    return total(mesh.metrics("worker-0"), "kvmesh_cached_prompt_tokens_total", tier="ssd")


def stored(mesh: Mesh) -> float:
    return total(mesh.metrics("kvstore-0"), "kvmesh_kvstore_stored_blocks", tier="ssd")


def fill(mesh: Mesh, first: int) -> None:
    """Other prompts, each on the SSD before the next."""
    for number in range(first, first + _OTHERS):
        before = stored(mesh)
        ask(mesh, number)
        wait_for(lambda before=before: stored(mesh) > before, within_s=60, what="spilled")  # type: ignore[misc]


def test_an_evicted_prefix_comes_back_from_the_ssd(mesh: Mesh) -> None:
    first = ask(mesh, 0)
    wait_for(lambda: stored(mesh) > 10, within_s=60, what="spilled")
    fill(mesh, 1)
    before = ssd_tokens(mesh)
    again = ask(mesh, 0)
    print(f"from the SSD: {ssd_tokens(mesh) - before:.0f} tokens, {again.seconds:.2f} s")
    assert again.text == first.text
    assert ssd_tokens(mesh) - before > 0
    assert again.cached_tokens > 0.9 * again.prompt_tokens - 32


def test_a_killed_node_serves_what_its_ssd_holds(mesh: Mesh) -> None:
    first = ask(mesh, 100)
    fill(mesh, 101)
    mesh.replace("kvstore-0")
    before = ssd_tokens(mesh)
    wait_for(lambda: indexed(mesh) > 60, within_s=60, what="announced again")
    again = ask(mesh, 100)
    assert again.text == first.text
    assert ssd_tokens(mesh) - before > 0


def indexed(mesh: Mesh) -> int:
    """Blocks that the router knows of the node."""
    (view,) = json.loads(mesh.kvmesh("ctl", "kvstores", "--json").stdout)
    return int(view["indexed_blocks"])


def test_operators_see_both_tiers(mesh: Mesh, tmp_path: Path) -> None:
    (row,) = json.loads(mesh.kvmesh("ctl", "kv", "stats", "--json").stdout)
    assert row["kvstore_id"] == "kvstore-0"
    assert row["ssd_state"] == "on"
    assert int(row["ssd_used_bytes"]) <= 512 * 2**20
    assert "1 keys destroyed" in mesh.kvmesh("ctl", "kv", "clear", "--tenant", "default").stdout
    (row,) = json.loads(mesh.kvmesh("ctl", "kv", "stats", "--json").stdout)
    assert (int(row["ssd_blocks"]), int(row["ram_blocks"])) == (0, 0)
