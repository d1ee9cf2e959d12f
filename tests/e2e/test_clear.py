"""Clearing a tenant over a whole running mesh: nothing of it is reused from any tier, and nothing brings it back."""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.common.bearer_keys import hash_key, new_key
from tests.support.completions import Completion, complete
from tests.support.mesh import Mesh, running_mesh, scrape, total, wait_for

PROMPTS = range(6)
NODES = ("kvstore-0", "kvstore-1")


class Tenant:
    """Requests under one key."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.key = new_key("kvm")

    def complete(self, mesh: Mesh, number: int, max_tokens: int = 2, **fields: Any) -> Completion:
        """A completion of one of a few long prompts."""
        return complete(mesh.url, number, 60, max_tokens, api_key=self.key, **fields)

    def cached(self, mesh: Mesh, number: int) -> int:
        """Prompt tokens of one request that were not computed."""
        return self.complete(mesh, number).cached_tokens


ONE, TWO = Tenant("one"), Tenant("two")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("".join(f"{hash_key(tenant.key)} {tenant.name}\n" for tenant in (ONE, TWO)))
    options = ("--workers", "1", "--kvstores", "2", "--gateways", "2", "--kvstore-mb", "64", "--kvstore-ssd-mb", "128")
    environment = {"KVMESH_GATEWAY_KEYS_FILE": str(keys)}
    with running_mesh(tmp_path_factory.mktemp("mesh"), *options, env=environment) as running:
        yield running


@functools.cache
def pages(mesh_state: Path) -> dict[str, str]:
    """Addresses of metrics by process; a process that is started again keeps its own."""
    return {one["name"]: one["metrics"] for one in json.loads((mesh_state / "mesh.json").read_text())["processes"]}


def metric(mesh: Mesh, processes: tuple[str, ...], name: str, **labels: str) -> float:
    """Sum over processes."""
    return sum(total(scrape(pages(mesh.state)[process]), name, **labels) for process in processes)


def stored(mesh: Mesh, tier: str) -> float:
    """Blocks on all nodes."""
    return metric(mesh, NODES, "kvmesh_kvstore_stored_blocks", tier=tier)


def refused(mesh: Mesh) -> float:
    """Blocks that came too late."""
    return metric(mesh, NODES, "kvmesh_kvstore_rejected_blocks_total", reason="cleared")


def settled(mesh: Mesh) -> float:
    """Blocks on SSD, once every block is there."""
    wait_for(lambda: stored(mesh, "ram") == stored(mesh, "ssd"), within_s=60, what="all spilled")
    return stored(mesh, "ssd")


def clear(mesh: Mesh, tenant: Tenant) -> str:
    """`kvmesh ctl kv clear`; what it says."""
    return mesh.kvmesh("ctl", "kv", "clear", "--tenant", tenant.name).stdout


def test_nothing_of_a_cleared_tenant_is_reused(mesh: Mesh) -> None:
    for tenant in (ONE, TWO):
        assert [tenant.cached(mesh, number) for number in PROMPTS] == [0] * len(PROMPTS)
        assert all(tenant.cached(mesh, number) > 0 for number in PROMPTS)
    series = scrape(pages(mesh.state)["worker-0"])
    for name in ("open_leases", "running_pulls", "queued_pushes"):
        assert f"kvmesh_mover_{name}" in {re.split(r"[{ ]", one)[0] for one in series}
    before = settled(mesh)
    said = clear(mesh, ONE)
    for name in ("gateway/gateway-0", "gateway/gateway-1", "kvstore/kvstore-0", "kvstore/kvstore-1"):
        assert f"{name}: carried out" in said
    dropped = [list(map(int, counts)) for counts in re.findall(r"(\d+) blocks in RAM and (\d+) on SSD dropped", said)]
    assert sum(ram for ram, _ in dropped) == sum(ssd for _, ssd in dropped) == before / 2
    assert sum(map(int, re.findall(r"(\d+) keys destroyed", said))) == 1
    # The requests alternate between the gateways. Those after the first must not find what it left either.
    assert [ONE.cached(mesh, number) for number in PROMPTS[:4]] == [0] * 4
    assert all(ONE.cached(mesh, number) > 0 for number in PROMPTS[:4])
    assert all(TWO.cached(mesh, number) > 0 for number in PROMPTS)


def test_what_was_under_way_does_not_come_back(mesh: Mesh) -> None:
    settled(mesh)
    late = threading.Thread(target=ONE.complete, args=(mesh, 50, 600), kwargs={"ignore_eos": True})
    late.start()
    wait_for(lambda: metric(mesh, ("worker-0",), "kvmesh_worker_running_requests") > 0, within_s=60, what="runs")
    refused_before = refused(mesh)
    clear(mesh, ONE)
    remaining = stored(mesh, "ram"), stored(mesh, "ssd")
    assert late.is_alive(), "the request must outlive the clearing"
    late.join(110)
    wait_for(lambda: refused(mesh) > refused_before, within_s=60, what="late pushes are refused")
    assert (stored(mesh, "ram"), stored(mesh, "ssd")) == remaining
    assert ONE.cached(mesh, 50) == 0


def test_a_restarted_node_brings_nothing_back(mesh: Mesh) -> None:
    ONE.complete(mesh, 60)
    TWO.complete(mesh, 60)
    settled(mesh)
    clear(mesh, ONE)
    remaining = stored(mesh, "ssd")
    assert remaining > 0
    for node in NODES:
        mesh.replace(node)
    assert stored(mesh, "ssd") == remaining
    assert ONE.cached(mesh, 60) == 0
    assert TWO.cached(mesh, 60) > 0


def test_nor_does_a_redis_that_forgets_or_a_gateway_that_starts(mesh: Mesh) -> None:
    numbers = range(70, 74)
    for number in numbers:
        ONE.complete(mesh, number)
    clear(mesh, ONE)
    for name in ("valkey", "gateway-0"):
        mesh.replace(name)
    assert [ONE.cached(mesh, number) for number in numbers] == [0] * len(numbers)
    assert "NOT carried out" not in clear(mesh, ONE)
    assert ONE.cached(mesh, numbers[0]) == 0
