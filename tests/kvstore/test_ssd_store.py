"""Both tiers together: spilling, coming back, restarting, reclaiming, damage, quotas, age, clearing."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.common.announcements import Tier
from services.common.security import MeshSecret
from services.common.settings import ConfigurationError
from services.common.transfer.protocol import STOP_DEADLINE, PullRequest
from services.kvstore.errors import StartFailed
from services.kvstore.ssd_format import PAGE_BYTES
from services.kvstore.ssd_keys import KEY_FILE_BYTES
from services.kvstore.ssd_log import BEFORE_DATA
from services.kvstore.ssd_setup import open_log
from tests.common.transfer.blocks import SECRET, chain, payload
from tests.kvstore.ssd import BLOCK_BYTES, SEGMENT_BYTES, Opened, flushed, opened, owner, pull, push, settings
from tests.support.waiting import SOON_S, eventually


async def fill(one: Opened, first: int, count: int, length: int = 8) -> None:
    """Chains that push older ones out, each on the SSD before the next comes."""
    for number in range(first, first + count):
        await push(one.store, chain(length, number))
        await flushed(one)


def used(path: Path) -> int:
    """Bytes that a directory takes on the disk."""
    return sum(os.stat(entry).st_blocks * 512 for entry in path.iterdir())


async def test_what_is_not_written_in_time_is_told(tmp_path: Path) -> None:
    go_on = threading.Event()

    def wait(at: str) -> None:
        assert at != BEFORE_DATA or go_on.wait(20)

    async with opened(tmp_path, reached=wait) as one:
        await push(one.store, chain(8))
        with capture_logs() as lines:
            assert not await one.layer.flush(0.05)
        assert [line["event"] for line in lines] == ["blocks were not written in time"]
        go_on.set()
        await flushed(one)


async def test_what_ram_gave_up_comes_back_from_the_ssd(tmp_path: Path) -> None:
    async with opened(tmp_path) as one:
        ids = chain(8)
        await push(one.store, ids)
        await fill(one, 1, 6)
        assert ids[-1] not in one.ram
        assert one.announced.tiers[ids[-1]] == Tier.SSD
        tiers = await pull(one.store, ids)
        assert len(tiers) == 8
        assert tiers == sorted(tiers)
        assert tiers[-1] == "ssd"
        assert one.announced.tiers[ids[-1]] == Tier.RAM
        assert await pull(one.store, ids) == ["ram"] * 8
        one.layer.tier.check()
        one.ram.check()


async def test_a_restart_serves_what_was_stored(tmp_path: Path) -> None:
    chains = [chain(8, number) for number in range(10)]
    async with opened(tmp_path) as one:
        await fill(one, 0, 10)
    async with opened(tmp_path) as one:
        assert one.announced.tiers == dict.fromkeys([block_id for ids in chains for block_id in ids], Tier.SSD)
        for ids in chains:
            assert await pull(one.store, ids) == ["ssd"] * 8
        longer = chain(12, 3)
        assert await push(one.store, longer) == 12
        await flushed(one)
    async with opened(tmp_path) as one:
        assert await pull(one.store, longer) == ["ssd"] * 12


async def test_an_offer_finds_its_parent_on_the_ssd(tmp_path: Path) -> None:
    ids = chain(6)
    async with opened(tmp_path) as one:
        await push(one.store, ids[:3])
        await flushed(one)
    async with opened(tmp_path) as one:
        assert await push(one.store, ids, first=3) == 3
        assert await pull(one.store, ids) == ["ram"] * 6


async def test_space_is_bounded_and_hot_blocks_survive(tmp_path: Path) -> None:
    limit = settings(tmp_path).ssd_bytes
    async with opened(tmp_path) as one:
        hot = chain(4, 200)
        await push(one.store, hot)
        for number in range(80):
            await fill(one, number, 1)
            assert used(tmp_path) <= limit + 2 * 4096
            assert await pull(one.store, hot) == ["ram"] * 4 or number
        stats = one.layer.tier.statistics()
        assert stats.num_segments <= 8
        assert one.layer.tier.totals.reclaimed_blocks > 0
        assert len(list(tmp_path.iterdir())) <= 10
        await flushed(one)
        one.layer.tier.check()
    async with opened(tmp_path) as one:
        assert await pull(one.store, hot) == ["ssd"] * 4
        for number in range(80):
            held = [block_id in one.announced.tiers for block_id in chain(8, number)]
            assert held == sorted(held, reverse=True)


async def test_each_segment_leaves_the_file_system_a_page(tmp_path: Path) -> None:
    """Room for eight files and nothing else is room for seven, of which one is kept free."""
    async with opened(tmp_path, ssd_bytes=8 * SEGMENT_BYTES + KEY_FILE_BYTES) as one:
        most = 0
        for number in range(30):
            await push(one.store, chain(16, number))
            await flushed(one)
            statistics = one.layer.tier.statistics()
            assert statistics.used_bytes == statistics.num_segments * (SEGMENT_BYTES + PAGE_BYTES)
            most = max(most, statistics.num_segments)
        assert most == 6


async def test_the_prefix_of_newer_blocks_is_copied_forward(tmp_path: Path) -> None:
    async with opened(tmp_path, ram_blocks=64) as one:
        for length in range(2, 60, 2):
            await push(one.store, chain(length, 250))
            await flushed(one)
            await fill(one, length, 1, 10)
        assert one.layer.tier.totals.copied_blocks > 0
    async with opened(tmp_path, ram_blocks=80) as one:
        assert len(await pull(one.store, chain(58, 250))) == 58


async def test_files_are_private_and_encrypted(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    async with opened(path) as one:
        await fill(one, 0, 2)
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert {stat.S_IMODE(entry.stat().st_mode) for entry in path.iterdir()} == {0o600}
    needle = payload(chain(1)[0], BLOCK_BYTES)[:64]
    assert not any(needle in entry.read_bytes() for entry in path.iterdir())
    plain = tmp_path / "plain"
    async with opened(plain, ssd_encrypt=False) as one:
        await fill(one, 0, 2)
    assert any(needle in entry.read_bytes() for entry in plain.iterdir())
    async with opened(plain) as one:
        assert await pull(one.store, chain(8)) == ["ssd"] * 8


async def test_owners_stay_within_their_quotas(tmp_path: Path) -> None:
    quota = 6 * BLOCK_BYTES
    async with opened(tmp_path, ram_owner_bytes=quota, owner_ssd_bytes=2 * quota) as one:
        other = chain(4, 100)
        await push(one.store, other, owner=owner("b"))
        await flushed(one)
        for number in range(8):
            # A tenant's generations share its quota.
            await push(one.store, chain(5, number), owner=owner("a", number))
            await flushed(one)
            assert one.ram.owner_bytes(owner("a")) <= quota
        assert one.layer.tier.statistics().num_bytes <= 2 * quota + 4 * BLOCK_BYTES
        assert await pull(one.store, other) == ["ram"] * 4
        one.layer.tier.check()
        one.ram.check()
    async with opened(tmp_path, owner_ssd_bytes=quota) as one:
        assert len(await pull(one.store, other)) == 4
        assert one.layer.tier.statistics().num_bytes <= quota + 4 * BLOCK_BYTES
        # What is there already counts against what comes now.
        await push(one.store, chain(5, 9), owner=owner("a", 9))
        await flushed(one)
        assert one.layer.tier.statistics().num_bytes <= quota + 4 * BLOCK_BYTES
        one.layer.tier.check()


async def test_owners_without_blocks_make_room_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.kvstore.ssd_keys.MAX_OWNERS", 6)
    async with opened(tmp_path, ssd_max_age_s=0.0) as one:
        for number in range(90):
            ids = chain(8, number)
            assert await push(one.store, ids, owner=bytes([number + 1]) * 16) == 8
            await flushed(one)
        assert one.layer.tier.is_on
        assert chain(8, 89)[-1] in one.layer.tier
        assert one.layer.tier.statistics().num_owners <= 6


async def test_a_disk_that_hangs_ends_the_tier_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hung = threading.Event()
    async with opened(tmp_path) as one:
        await fill(one, 0, 8)
        preadv = os.preadv

        def hang(*arguments: Any) -> int:
            hung.wait(60)
            return preadv(*arguments)

        monkeypatch.setattr(os, "preadv", hang)
        started_s = time.monotonic()
        await pull(one.store, chain(8))
        assert time.monotonic() - started_s < SOON_S
        await eventually(lambda: not one.layer.tier.is_on)
        assert "takes longer" in one.layer.tier.statistics().state
        assert await push(one.store, chain(8, 77)) == 8
        hung.set()
        await one.layer._loader.drain()
        assert one.store.statistics().ram.leased_blocks == 0


async def test_old_blocks_are_not_served(tmp_path: Path) -> None:
    now_s = 1e9
    async with opened(tmp_path, clock=lambda: now_s, ssd_max_age_s=100.0) as one:
        await fill(one, 0, 5)
        now_s += 60
        await fill(one, 5, 5)
        now_s += 60
        assert [tier for tier in await pull(one.store, chain(8, 1)) if tier == "ssd"] == []
        await one.layer.tier.expire()
        assert chain(8, 0)[0] not in one.layer.tier
        assert chain(8, 5)[0] in one.layer.tier
    async with opened(tmp_path, clock=lambda: now_s, ssd_max_age_s=100.0) as one:
        assert await pull(one.store, chain(8, 1)) == []
        assert await pull(one.store, chain(8, 6)) == ["ssd"] * 8


async def test_a_pull_that_gives_up_leaves_nothing_lent(tmp_path: Path) -> None:
    async with opened(tmp_path) as one:
        await fill(one, 0, 8)
        task = asyncio.create_task(one.store.lease(PullRequest(chain(8), 0, 10.0)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(await pull(one.store, chain(8))) == 8
        lease = await one.store.lease(PullRequest(chain(8, 1), 0, 0.0))
        assert lease.stop in (STOP_DEADLINE, "")
        lease.release(0, "")
        await one.layer._loader.drain()
        assert one.store.statistics().ram.leased_blocks == 0
        one.layer.tier.check()


async def test_one_directory_is_for_one_node(tmp_path: Path) -> None:
    async with opened(tmp_path):
        with pytest.raises(StartFailed, match="in use"):
            open_log(settings(tmp_path), MeshSecret(SECRET))


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    for wrong in (
        settings(tmp_path, ssd_bytes=2 * SEGMENT_BYTES),
        settings(tmp_path, ssd_path=None),
        settings(tmp_path, ssd_bytes=2**40, ssd_segment_bytes=2**20),
    ):
        with pytest.raises(ConfigurationError, match="ssd_"):
            open_log(wrong, MeshSecret(SECRET))
