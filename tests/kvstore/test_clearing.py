"""Clearing a tenant on a node: nothing of it is served again, whatever was under way and whatever comes late."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from services.common.blocks import TENANT_TAG_BYTES
from services.common.transfer.protocol import PullRequest
from services.kvstore.clearing import Cleared, Clearing
from services.kvstore.ssd_log import BEFORE_COMMIT, BEFORE_DATA
from tests.common.transfer.blocks import chain
from tests.kvstore.ssd import flushed, offer, opened, owner, pull, push
from tests.support.waiting import eventually

MINE, OTHER = chain(8, 1), chain(8, 2)


async def clear(clearing: Clearing, generation: int) -> Cleared:
    """Clear the tenant of "a"; what that has taken."""
    tag = owner("a")[:TENANT_TAG_BYTES]
    await clearing.carry_out({tag: generation})
    return clearing.done(tag)


@pytest.mark.parametrize("encrypt", [True, False])
async def test_clearing_is_final(tmp_path: Path, encrypt: bool) -> None:
    async with opened(tmp_path, ssd_encrypt=encrypt) as one:
        clearing = Clearing(one.store)
        await push(one.store, MINE, owner=owner("a"))
        await push(one.store, OTHER, owner=owner("b"))
        await flushed(one)
        lease = await one.store.lease(PullRequest(MINE, 0, 5.0))
        assert await clear(clearing, 5) == Cleared(8, 8, 1)
        assert await clear(clearing, 5) == Cleared(8, 8, 1), "the same clearing, told twice"
        assert await pull(one.store, MINE) == []
        lease.release(8, "")
        assert len(await pull(one.store, OTHER)) == 8
        assert set(one.announced.tiers) == set(OTHER)
        assert one.ram.owner_bytes(owner("a")) == 0
        one.ram.check()
        one.layer.tier.check()
    async with opened(tmp_path, ssd_encrypt=encrypt) as one:
        assert await pull(one.store, MINE) == []
        assert len(await pull(one.store, OTHER)) == 8


async def test_late_pushes_are_refused_and_those_after_the_clearing_are_not(tmp_path: Path) -> None:
    async with opened(tmp_path) as one:
        clearing = Clearing(one.store)
        under_way = await offer(one.store, MINE, owner=owner("a", 3))
        await clear(clearing, 5)
        assert await under_way.commit() == 0
        assert await push(one.store, MINE, owner=owner("a", 4)) == 0
        assert one.store.totals.rejected_blocks == 16
        assert one.store.statistics().ram.num_bytes == 0
        assert await push(one.store, OTHER, owner=owner("a", 5)) == 8
        await flushed(one)
        assert await clear(clearing, 4) == Cleared(), "an older clearing that comes late"
        assert await pull(one.store, OTHER) == ["ram"] * 8
    async with opened(tmp_path) as one:
        assert await pull(one.store, OTHER) == ["ssd"] * 8


@pytest.mark.parametrize("step", [BEFORE_DATA, BEFORE_COMMIT])
async def test_a_write_under_way_brings_nothing_back(tmp_path: Path, step: str) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def wait(at: str) -> None:
        if at == step:
            reached.set()
            assert go_on.wait(20)

    async with opened(tmp_path, reached=wait) as one:
        await push(one.store, MINE, owner=owner("a"))
        await eventually(reached.is_set)
        task = asyncio.create_task(clear(Clearing(one.store), 5))
        await asyncio.sleep(0)
        assert await pull(one.store, MINE) == []
        assert not task.done(), "the key is in use"
        go_on.set()
        assert await task == Cleared(8, 0, 1)
        await flushed(one)
        assert not one.announced.tiers
        assert one.layer.tier.statistics().num_blocks == 0
        one.ram.check()
    async with opened(tmp_path) as one:
        assert not one.announced.tiers


async def test_a_read_under_way_brings_nothing_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path) as one:
        await push(one.store, MINE, owner=owner("a"))
        await flushed(one)
    async with opened(tmp_path) as one:
        reached, go_on, preadv = threading.Event(), threading.Event(), os.preadv

        def slow(*arguments: Any) -> int:
            reached.set()
            assert go_on.wait(20)
            return preadv(*arguments)

        monkeypatch.setattr(os, "preadv", slow)
        task = asyncio.create_task(pull(one.store, MINE))
        await eventually(reached.is_set)
        assert await clear(Clearing(one.store), 5) == Cleared(0, 8, 1)
        go_on.set()
        assert await task == []
        assert not one.announced.tiers
        assert one.store.statistics().ram.num_bytes == 0
        one.ram.check()


async def test_a_key_that_cannot_be_destroyed_is_an_error_until_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as one:
        clearing = Clearing(one.store)
        await push(one.store, MINE, owner=owner("a"))
        await flushed(one)

        def refuse(*_: object) -> int:
            raise OSError("the disk refuses")

        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", refuse)
            with pytest.raises(OSError, match="the disk refuses"):
                await clear(clearing, 5)
        assert not one.layer.tier.is_on
        assert await pull(one.store, MINE) == []
        assert await clear(clearing, 5) == Cleared(8, 8, 1)
    async with opened(tmp_path) as one:
        assert not one.announced.tiers
