"""The bench of the KV tier: what it says is cold was, and every path that it names is one."""

from __future__ import annotations

import mmap
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from bench import kv_peer_runs
from bench.kv_measure import Measured, Row
from bench.kv_node import SECRET, drop_from_page_cache, read_bytes_of
from bench.kv_paths import ONE_SIDED, Buffers, Cell, DiskFile, Seen, disk_path
from bench.kv_peer_runs import measure_peers
from bench.kv_peers import ENVIRONMENTS
from bench.kv_ram import MEMCPY, TCP, measure_ram
from bench.kv_ssd import measure_ssd
from bench.kv_table import Machine, show, write
from services.common.transfer.errors import PeerLost
from services.common.transfer.grpc_client import GrpcTransport
from services.common.transfer.protocol import Transport
from services.common.transfer.shm_client import ShmTransport
from services.common.transfer.ucx_reactor import ucx_importable
from tests.support.valkey import Valkey

_CELL = Cell(256 * 1024, 8)
_SECONDS = 0.01


@pytest_asyncio.fixture
async def transports() -> AsyncIterator[list[Transport]]:
    made: list[Transport] = [ShmTransport(SECRET.pull_key, []), GrpcTransport(SECRET)]
    yield made
    for transport in made:
        await transport.close()


async def test_ram_rows_stand_beside_ceilings(tmp_path: Path, valkey: Valkey, transports: list[Transport]) -> None:
    measured, idle = await measure_ram(tmp_path, valkey.url, transports, [_CELL], rounds=1, seconds=_SECONDS)
    rows = [one.row() for one in measured]
    assert {row["transport"] for row in rows if row["ceiling"]} >= {MEMCPY, TCP}
    ours = [row for row in rows if not row["ceiling"]]
    assert [(row["transport"], row["verified"]) for row in ours] == [
        (name, verified) for name in ("shm", "grpc") for verified in (True, False)
    ]
    assert {row["path"] for row in ours if row["transport"] == "shm"} == {ONE_SIDED}
    assert all(row["served_from"] == "ram" and row["gb_per_s"] > 0 < row["p50_us"] <= row["p99_us"] for row in ours)
    assert idle.keys() == {"holder", "puller"}


async def test_ssd_rows_are_cold_and_warm(tmp_path: Path, valkey: Valkey, transports: list[Transport]) -> None:
    measured = await measure_ssd(
        tmp_path, tmp_path / "ssd", valkey.url, transports, [_CELL], encrypt=True, rounds=1, seconds=_SECONDS
    )
    rows = [one.row() for one in measured]
    assert [(row["transport"], row["served_from"]) for row in rows] == [
        *(("shm", "ssd"), ("grpc", "ssd")),
        *(("shm", "ram"), ("grpc", "ram")),
    ]
    if await past_the_cache(tmp_path):
        assert [row["cache"] for row in rows] == ["cold", "cold", "warm", "warm"]


async def test_what_came_from_a_cache_is_not_cold(tmp_path: Path) -> None:
    file = DiskFile(tmp_path / "raw", 8 * 2**20, 2, cached=True)
    cell = Cell(2**20, 2)
    measured = Measured("disk", cell, disk_path(cell, Buffers(2**20, 4), file), tier="ssd", cache="cold")
    await measured.run_round(0.0)
    assert measured.row()["cache"] == "not shown to be cold"
    file.close()


async def test_a_promoted_block_is_not_cold() -> None:
    async def fetch() -> None:
        pass

    measured = Measured("shm", _CELL, fetch, tier="ssd", cache="cold", seen=Seen(tiers={"ssd", "ram"}))
    await measured.run_round(0.0)
    measured.samples.disk_share = [1.0]
    assert measured.row()["cache"] == "not shown to be cold"
    measured.seen.tiers.discard("ram")
    assert measured.row()["cache"] == "cold"


async def test_failed_pulls_are_shown_and_few() -> None:
    outcomes = iter([True, False, True, True])

    async def fetch() -> None:
        if not next(outcomes, False):
            raise PeerLost("the peer is silent")

    measured = Measured("ucx", _CELL, fetch)
    await measured.run_round(0.0)
    assert measured.row()["failed"] == 1
    with pytest.raises(PeerLost):
        await measured.run_round(0.0)


async def test_the_page_cache_is_dropped(tmp_path: Path) -> None:
    if not await past_the_cache(tmp_path):
        pytest.skip("this file system lives in the page cache")
    path = tmp_path / "file"
    path.write_bytes(os.urandom(2**20))
    drop_from_page_cache(tmp_path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        assert memory[::4096]
        # What is mapped cannot be dropped.
        with pytest.raises(RuntimeError, match="still in the page cache"):
            drop_from_page_cache(tmp_path)


async def test_peers_have_rows_or_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ("ucxx tcp", "lmcache get")
    monkeypatch.setattr(kv_peer_runs, "ENVIRONMENTS", {name: ENVIRONMENTS[name] for name in chosen})
    peers = await measure_peers(None, [(256 * 1024, 2)], rounds=1, seconds=_SECONDS)
    assert peers.left_out["lmcache get"] == "no --peers"
    if ucx_importable():
        assert [(row["transport"], row["in_flight"], row["verified"]) for row in peers.rows] == [("ucxx tcp", 2, False)]
    else:
        assert peers.left_out.keys() == set(chosen)
    script = tmp_path / "bin" / "python"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\necho 'no such module' >&2\nexit 1\n")
    script.chmod(0o700)
    monkeypatch.setattr(kv_peer_runs, "ENVIRONMENTS", {"mooncake tcp": {}})
    peers = await measure_peers(tmp_path, [(256 * 1024, 2)], rounds=1, seconds=_SECONDS)
    assert (peers.rows, peers.left_out) == ([], {"mooncake tcp": "no such module"})


def test_the_table_and_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row: Row = {"block_bytes": 2**18, "tier": "ram", "same_host": True, "in_flight": 1, "p50_us": 90.0, "p99_us": 99.0}
    row |= {"cpu_s_per_gb": 0.5, "verified": False, "ceiling": False}
    ceiling = row | {"transport": MEMCPY, "gb_per_s": 8.0, "ceiling": True}
    rows = [ceiling, row | {"transport": "shm", "gb_per_s": 5.0}]
    rows.append(row | {"transport": "shm", "gb_per_s": 4.0, "verified": True})
    rows = [one | {"path": "asked"} if one["transport"] == "shm" else one for one in rows]
    show(rows, {"holder": 0.01}, {"x": "no"}, Machine(2, "m", "k", 1.0, "c"))
    shown = capsys.readouterr().out
    line = next(line for line in shown.splitlines() if "shm" in line)
    assert [word for word in line.split() if word[0].isdigit()] == [
        "256",
        "1",
        "4.00",
        "5.00",
        "90",
        "99",
        "0.50",
        "0.50",
    ]
    assert "shm, asked" in line
    assert "left out: x: no" in shown
    write(tmp_path / "kv.json", rows, {}, {}, Machine(2, "m", "k", 1.0, "c"))
    assert '"gb_per_s": 4.0' in (tmp_path / "kv.json").read_text()


async def past_the_cache(folder: Path) -> bool:
    """Whether reads of files there can be seen to come from a disk."""
    try:
        file = DiskFile(folder / "probe", 2**20, 1, cached=False)
    except OSError:
        return False
    before = read_bytes_of(0)
    await file.read(0, Buffers(2**20, 1).slots)
    file.close()
    (folder / "probe").unlink()
    return read_bytes_of(0) > before
