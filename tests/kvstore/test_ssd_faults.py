"""Crashes, damage and full disks: what comes back is exact, and nothing but that comes back."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.common.announcements import Tier
from services.kvstore.ssd_format import PAGE_BYTES
from services.kvstore.ssd_log import (
    AFTER_REMOVE,
    BEFORE_COMMIT,
    BEFORE_COPY,
    BEFORE_DATA,
    BEFORE_REMOVE,
    MID_COMMIT,
    MID_RECORD,
)
from tests.common.transfer.blocks import chain
from tests.kvstore.ssd import Opened, flushed, opened, pull, push, settings
from tests.kvstore.ssd_crash import CHAIN_BLOCKS, THEN

_ROOT = Path(__file__).parents[2]
# Enough to reclaim several segments.
_CHAINS = 70


def crash(path: Path, step: str, passes: int) -> list[int]:
    """Chains that a process had committed when it was killed at a step."""
    together = 5 if step == MID_COMMIT else 1
    arguments = (str(path), step, str(passes), str(_CHAINS), str(together))
    command = [sys.executable, "-m", "tests.kvstore.ssd_crash", *arguments]
    ended = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == -9, ended.stderr[-2000:]
    lines = [line for line in ended.stdout.splitlines() if line and not line.startswith("20")]
    return [int(number) for number in lines[-1].split()] if lines else []


async def check_all(one: Opened, chains: int = _CHAINS, length: int = CHAIN_BLOCKS) -> dict[int, int]:
    """Pull every chain, byte for byte; how many blocks of each came. What is announced is prefix-closed and is here."""
    found = {}
    for number in range(chains):
        ids = chain(length, number)
        listed = [block_id in one.announced.tiers for block_id in ids]
        assert listed == sorted(listed, reverse=True)
        found[number] = len(await pull(one.store, ids))
        assert found[number] <= sum(listed)
    one.layer.tier.check()
    one.ram.check()
    return found


@pytest.mark.parametrize(
    ("step", "passes"),
    [
        (BEFORE_DATA, 3),
        (MID_RECORD, 10),
        (BEFORE_COMMIT, 0),
        (BEFORE_COMMIT, 4),
        (MID_COMMIT, 0),
        (BEFORE_REMOVE, 0),
        (AFTER_REMOVE, 1),
    ],
)
async def test_a_kill_at_any_step_loses_at_most_what_was_not_committed(tmp_path: Path, step: str, passes: int) -> None:
    committed = crash(tmp_path, step, passes)
    async with opened(tmp_path) as one:
        found = await check_all(one)
        if step in (BEFORE_DATA, MID_RECORD, BEFORE_COMMIT, MID_COMMIT):
            # Those are steps of the first segments: nothing is given up there.
            assert [number for number, count in found.items() if count == CHAIN_BLOCKS] == committed
        else:
            assert sum(count == CHAIN_BLOCKS for count in found.values()) > 0.5 * len(committed)
        await push(one.store, chain(CHAIN_BLOCKS, 200))
        await flushed(one)
    async with opened(tmp_path) as one:
        assert len(await pull(one.store, chain(CHAIN_BLOCKS, 200))) == CHAIN_BLOCKS
        assert used(tmp_path) <= settings(tmp_path).ssd_bytes + 2 * PAGE_BYTES


@pytest.mark.parametrize(
    ("step", "passes"),
    [
        (BEFORE_COPY, 0),
        (BEFORE_COPY + THEN + MID_RECORD, 0),
        (BEFORE_COPY + THEN + MID_RECORD, 12),
        (BEFORE_COPY + THEN + BEFORE_COMMIT, 0),
        (BEFORE_COPY + THEN + BEFORE_REMOVE, 0),
        (BEFORE_COPY + THEN + AFTER_REMOVE, 0),
    ],
)
async def test_a_kill_while_space_is_reclaimed_loses_nothing_that_is_kept(
    tmp_path: Path, step: str, passes: int
) -> None:
    """What is copied forward is in the old segment or in the new one at every moment, or in both."""
    committed = crash(tmp_path, step, passes)
    assert 0 in committed
    async with opened(tmp_path) as one:
        found = await check_all(one)
        assert found[0] == CHAIN_BLOCKS
        assert found[committed[-1]] == CHAIN_BLOCKS
        assert used(tmp_path) <= settings(tmp_path).ssd_bytes + 2 * PAGE_BYTES


async def test_kills_in_a_row(tmp_path: Path) -> None:
    rng = random.Random(1)
    for _ in range(4):
        crash(tmp_path, rng.choice((BEFORE_DATA, MID_RECORD, BEFORE_COMMIT, BEFORE_REMOVE)), rng.randrange(3))
        async with opened(tmp_path) as one:
            await check_all(one)


async def copies(folder: Path) -> AsyncIterator[Path]:
    """Twelve fresh copies, one after the other, of a closed node's files with 20 chains."""
    original, copy = folder / "original", folder / "copy"
    async with opened(original) as one:
        for number in range(20):
            await push(one.store, chain(CHAIN_BLOCKS, number))
            await flushed(one)
    for _ in range(12):
        shutil.copytree(original, copy)
        yield copy
        shutil.rmtree(copy)


async def test_flipped_bits_are_never_served(tmp_path: Path) -> None:
    rng = random.Random(2)
    async for damaged in copies(tmp_path):
        files = sorted(damaged.glob("segment-*")) + [damaged / "keys"] * 2
        for _ in range(rng.randrange(1, 30)):
            file = rng.choice(files)
            flip(file, rng.randrange(file.stat().st_size if file.name != "keys" else 96))
        async with opened(damaged) as one:
            await check_all(one, 20)
            await push(one.store, chain(CHAIN_BLOCKS, 300 % 256))
            await check_all(one, 20)


async def test_truncated_segments_are_cut(tmp_path: Path) -> None:
    rng = random.Random(3)
    async for damaged in copies(tmp_path):
        file = rng.choice(sorted(damaged.glob("segment-*")))
        os.truncate(file, rng.randrange(file.stat().st_size))
        async with opened(damaged) as one:
            await check_all(one, 20)


async def test_plain_payloads_are_verified_too(tmp_path: Path) -> None:
    async with opened(tmp_path, ssd_encrypt=False) as one:
        for number in range(12):
            await push(one.store, chain(CHAIN_BLOCKS, number))
            await flushed(one)
    for file in tmp_path.glob("segment-*"):
        for position in range(3 * PAGE_BYTES, file.stat().st_size, 5 * PAGE_BYTES):
            flip(file, position)
    async with opened(tmp_path, ssd_encrypt=False) as one:
        found = await check_all(one, 12)
        assert sum(found.values()) < 12 * CHAIN_BLOCKS
        assert one.layer.tier.totals.verification_failures > 0


async def test_another_mesh_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path) as one:
        await push(one.store, chain(CHAIN_BLOCKS))
        await flushed(one)
    monkeypatch.setattr("tests.kvstore.ssd.SECRET", "the secret of another mesh")
    async with opened(tmp_path) as one:
        assert one.announced.tiers == {}
        assert await pull(one.store, chain(CHAIN_BLOCKS)) == []


async def test_a_full_disk_ends_the_tier_and_not_the_node(small_disk: Path) -> None:
    async with opened(small_disk / "kv", ram_blocks=32) as one:
        for number in range(60):
            ids = chain(CHAIN_BLOCKS, number)
            assert await push(one.store, ids) == CHAIN_BLOCKS
            await flushed(one)
            assert (await pull(one.store, ids)) == ["ram"] * CHAIN_BLOCKS
        assert not one.layer.tier.is_on
        assert "No space left" in one.layer.tier.statistics().state
        assert set(one.announced.tiers.values()) == {Tier.RAM}
        assert set(one.announced.tiers) == {block_id for block_id in one.announced.tiers if block_id in one.ram}
        await check_all(one, 60)
    async with opened(small_disk / "kv") as one:
        await check_all(one, 60)


async def test_a_disk_that_fails_reads_ends_the_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path) as one:
        for number in range(10):
            await push(one.store, chain(CHAIN_BLOCKS, number))
            await flushed(one)

        def fail(*_: object) -> int:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "preadv", fail)
        ids = chain(CHAIN_BLOCKS, 0)
        assert len(await pull(one.store, ids)) < CHAIN_BLOCKS
        assert one.layer.tier.statistics().state == "OSError: Input/output error"
        assert await push(one.store, chain(CHAIN_BLOCKS, 99)) == CHAIN_BLOCKS
        assert await pull(one.store, chain(CHAIN_BLOCKS, 99)) == ["ram"] * CHAIN_BLOCKS
        assert set(one.announced.tiers.values()) == {Tier.RAM}


@pytest.mark.parametrize("call", ["pwrite", "fdatasync", "posix_fallocate"])
async def test_a_disk_that_fails_writes_ends_the_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """What was committed before is there after a restart, and of what failed nothing."""
    async with opened(tmp_path) as one:
        for number in range(3):
            await push(one.store, chain(CHAIN_BLOCKS, number))
            await flushed(one)

        def fail(*_: object) -> int:
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as broken:
            broken.setattr(os, call, fail)
            for number in range(3, 12):
                assert await push(one.store, chain(CHAIN_BLOCKS, number)) == CHAIN_BLOCKS
                await flushed(one)
        assert one.layer.tier.statistics().state == "OSError: Input/output error"
        assert set(one.announced.tiers.values()) == {Tier.RAM}
        assert await pull(one.store, chain(CHAIN_BLOCKS, 11)) == ["ram"] * CHAIN_BLOCKS
    async with opened(tmp_path) as one:
        found = await check_all(one, 12)
        assert [found[number] for number in range(3)] == [CHAIN_BLOCKS] * 3
        assert found[11] == 0


async def test_reads_pin_what_reclaim_wants(tmp_path: Path) -> None:
    async with opened(tmp_path) as one:
        for number in range(10):
            await push(one.store, chain(CHAIN_BLOCKS, number))
            await flushed(one)

        async def read_all() -> None:
            for _ in range(5):
                for number in range(80):
                    await pull(one.store, chain(CHAIN_BLOCKS, number))

        async def write_all() -> None:
            for number in range(10, 80):
                await push(one.store, chain(CHAIN_BLOCKS, number))
                await flushed(one)

        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(read_all())
            group.create_task(read_all())
            group.create_task(write_all())
        await flushed(one)
        assert one.layer.tier.is_on
        assert one.layer.tier.totals.reclaimed_blocks > 0
        assert one.store.statistics().ram.leased_blocks == 0
        await check_all(one, 80)


def used(path: Path) -> int:
    """Bytes that a directory takes on the disk."""
    return sum(os.stat(entry).st_blocks * 512 for entry in path.iterdir())


def flip(path: Path, position: int) -> None:
    """Change one bit."""
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes((byte ^ 16,)))
