"""A prefix that worker and RAM have given up comes back from the SSD, also after the node was killed."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.support.mesh import MODEL, Mesh, running_mesh, total, wait_for

_WORDS = 150
_OTHERS = 6


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    options = ("--workers", "1", "--kvstores", "1", "--kv-cache-mb", "32", "--kvstore-mb", "32")
    with running_mesh(tmp_path_factory.mktemp("mesh"), *options, "--kvstore-ssd-mb", "512") as running:
        yield running


def complete(mesh: Mesh, number: int) -> dict[str, Any]:
    """A completion of a long prompt; greedy."""
    prompt = " ".join(f"word{(number * 7919 + i * 31) % 997}" for i in range(_WORDS))
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0}
    request = Request(f"{mesh.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(request, timeout=120) as response:
        answer: dict[str, Any] = json.loads(response.read())
    return answer


def ssd_tokens(mesh: Mesh) -> float:
    """Prompt tokens that came from the SSD."""
    return total(mesh.metrics("worker-0"), "kvmesh_cached_prompt_tokens_total", tier="ssd")


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def stored(mesh: Mesh) -> float:
    return total(mesh.metrics("kvstore-0"), "kvmesh_kvstore_stored_blocks", tier="ssd")


def fill(mesh: Mesh, first: int) -> None:
    """Other prompts, each on the SSD before the next."""
    for number in range(first, first + _OTHERS):
        before = stored(mesh)
        complete(mesh, number)
        wait_for(lambda before=before: stored(mesh) > before, within_s=10, what="spilled")  # type: ignore[misc]


def test_an_evicted_prefix_comes_back_from_the_ssd(mesh: Mesh) -> None:
    first = complete(mesh, 0)
    wait_for(lambda: stored(mesh) > 10, within_s=10, what="spilled")
    fill(mesh, 1)
    before = ssd_tokens(mesh)
    started_s = time.monotonic()
    again = complete(mesh, 0)
    print(f"from the SSD: {ssd_tokens(mesh) - before:.0f} tokens, {time.monotonic() - started_s:.2f} s")
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert ssd_tokens(mesh) - before > 0
    assert cached(again) > 0.9 * again["usage"]["prompt_tokens"] - 32


def test_a_killed_node_serves_what_its_ssd_holds(mesh: Mesh) -> None:
    first = complete(mesh, 100)
    fill(mesh, 101)
    pid = mesh.process("kvstore-0")["pid"]
    mesh.kill("kvstore-0", signal.SIGKILL)
    wait_for(lambda: mesh.process("kvstore-0")["pid"] not in (None, pid), within_s=20, what="a new process")
    mesh.wait_ready()
    before = ssd_tokens(mesh)
    wait_for(lambda: indexed(mesh) > 60, within_s=15, what="announced again")
    again = complete(mesh, 100)
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert ssd_tokens(mesh) - before > 0


def indexed(mesh: Mesh) -> int:
    """Blocks that the router knows of the node."""
    (view,) = json.loads(mesh._kvmesh("ctl", "kvstores", "--json").stdout)
    return int(view["indexed_blocks"])


def test_operators_see_both_tiers(mesh: Mesh, tmp_path: Path) -> None:
    (row,) = json.loads(mesh._kvmesh("ctl", "kv", "stats", "--json").stdout)
    assert row["kvstore_id"] == "kvstore-0"
    assert row["ssd_state"] == "on"
    assert int(row["ssd_used_bytes"]) <= 512 * 2**20
    assert "1 keys destroyed" in mesh._kvmesh("ctl", "kv", "clear", "--tenant", "default").stdout
    (row,) = json.loads(mesh._kvmesh("ctl", "kv", "stats", "--json").stdout)
    assert (int(row["ssd_blocks"]), int(row["ram_blocks"])) == (0, 0)
