"""`kvmesh ctl kv` against a real Valkey: what it says, and with which status, when something does not answer."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from services.common.blocks import tenant_tag
from services.common.keys import KeySpace
from services.common.security import MeshSecret
from tests.cli.test_commands import kvmesh
from tests.common.transfer.blocks import SECRET
from tests.kvstore.conftest import StartKvStore, start_kvstore
from tests.support.processes import free_port
from tests.support.valkey import Valkey

__all__ = ["start_kvstore"]


@pytest.fixture
def options(tmp_path: Path, valkey: Valkey) -> tuple[str, ...]:
    """Where the mesh is, as for one that was not started here."""
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    return ("--redis-url", valkey.url, "--secret-file", str(secret))


def test_a_clearing_names_what_did_not_answer(tmp_path: Path, valkey: Valkey, options: tuple[str, ...]) -> None:
    keys = KeySpace().generations()
    valkey._call("HSET", keys.followers, "gateway/g1", f'"1 0 {int(time.time()) - 60}"')
    address = f"127.0.0.1:{free_port()}"
    result = kvmesh("ctl", "kv", "clear", "--tenant", "one", "--node", address, *options, state=tmp_path)
    assert result.returncode == 1
    assert "gateway/g1: NOT carried out (may reach older blocks); last heard of 6" in result.stdout
    assert f"node {address}: NO ANSWER (UNAVAILABLE" in result.stdout
    assert result.stderr == ""
    tag = tenant_tag(MeshSecret(SECRET).block_key, "one")
    generation = result.stdout.split("generation ")[1].split("\n")[0]
    assert valkey._call("HVALS", keys.table).split(b"\r\n")[2] == generation.encode()
    assert tag in valkey._call("HKEYS", keys.table)


def test_nothing_is_cleared_without_redis(tmp_path: Path, valkey: Valkey, options: tuple[str, ...]) -> None:
    valkey.kill()
    result = kvmesh("ctl", "kv", "clear", "--tenant", "one", *options, state=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "kvmesh: redis does not answer\n"
    result = kvmesh("ctl", "kv", "clear", "--tenant", "one", *options[2:], state=tmp_path)
    assert result.returncode == 2
    assert "--redis-url" in result.stderr


def test_a_tenant_without_a_name_is_refused(tmp_path: Path, valkey: Valkey, options: tuple[str, ...]) -> None:
    """An unset variable in a script must not look like a clearing that was carried out."""
    result = kvmesh("ctl", "kv", "clear", "--tenant", "", *options, state=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert "--tenant is empty" in result.stderr
    assert b"kvmesh" not in valkey._call("KEYS", "*generations*")


def test_stats_of_all_registered_nodes(
    tmp_path: Path, valkey: Valkey, options: tuple[str, ...], start_kvstore: StartKvStore
) -> None:
    node = start_kvstore(
        "grpc", "--ssd-path", str(tmp_path / "ssd"), "--ssd-bytes", str(64 * 2**20), "--ssd-encrypt", "false"
    )
    assert any(line["event"] == "blocks on the ssd are not encrypted" for line in node.log())
    result = kvmesh("ctl", "kv", "stats", *options, state=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    lines = dict(re.split(r"  +", line) for line in result.stdout.splitlines()[1:])
    assert (lines["SSD encryption"], lines["SSD state"], lines["RAM blocks"]) == ("OFF", "on", "0")
    gone = f"127.0.0.1:{free_port()}"
    both = ("--node", gone, "--node", node.ready["address"])
    result = kvmesh("ctl", "kv", "stats", "--json", *both, *options, state=tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith(f"node {gone}: no answer (UNAVAILABLE")
    (row,) = json.loads(result.stdout)
    assert (row["kvstore_id"], row["ssd_encrypted"], row["pulls_ram_pulls"]) == ("kv-1", False, "0")


def test_stats_need_a_node(tmp_path: Path, options: tuple[str, ...]) -> None:
    result = kvmesh("ctl", "kv", "stats", *options, state=tmp_path)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "no node is known" in result.stderr
