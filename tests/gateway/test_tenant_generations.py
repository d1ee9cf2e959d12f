"""A gateway's knowledge of cleared tenants: from Redis, from its file, and what it does without either."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.common import generation_table
from services.common.blocks import tenant_tag
from services.common.generation_table import GenerationTable
from services.common.redis_client import connect_redis
from services.common.registry import new_epoch
from services.common.settings import ConfigurationError
from services.gateway.tenant_generations import ALONE_AFTER_S, TenantGenerations
from tests.support.valkey import Valkey
from tests.support.waiting import SOON_S, eventually

KEY = bytes(range(32))


@asynccontextmanager
async def running(url: str, path: Path | None = None, name: str = "g1") -> AsyncIterator[TenantGenerations]:
    generations = TenantGenerations(url, name, KEY, path)
    task = asyncio.create_task(generations.run())
    await generations.started()
    try:
        yield generations
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await generations.close()


async def clear(url: str, tenant: str) -> int:
    """Clear a tenant; everybody must have carried it out."""
    client = connect_redis(url)
    try:
        outcome = await GenerationTable(client).clear(tenant_tag(KEY, tenant), timeout_s=30)
    finally:
        await client.aclose()
    assert outcome.missing == {}
    return outcome.generation


@pytest.fixture(autouse=True)
def settle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_table, "SETTLE_S", 0.0)


async def test_requests_after_a_clearing_have_its_generation(valkey: Valkey) -> None:
    async with running(valkey.url) as generations, running(valkey.url, name="g2") as second:
        assert generations.of("one", time.monotonic()) == 0
        generation = await clear(valkey.url, "one")
        # With no wait in between: the clearing has returned.
        assert generations.of("one", time.monotonic()) == second.of("one", time.monotonic()) == generation
        assert generations.of("two", time.monotonic()) == 0
    assert await clear(valkey.url, "one") > generation, "who has left in order is not waited for"


async def test_a_gateway_that_redis_does_not_answer_keeps_to_itself(valkey: Valkey) -> None:
    async with running(valkey.url) as generations:
        known = await clear(valkey.url, "one")
        later_s = time.monotonic() + ALONE_AFTER_S + 1
        own = generations.of("one", later_s)
        assert own not in (0, known)
        assert generations.of("two", later_s + 5) == own, "one for as long as it lasts"
        assert generations.of("one", time.monotonic()) == known
        assert generations.of("one", later_s) != own, "and none a second time"


async def test_a_gateway_starts_without_redis_and_alone(tmp_path: Path) -> None:
    began, began_s = new_epoch(), time.monotonic()
    async with running(f"unix://{tmp_path / 'nobody'}") as generations:
        assert time.monotonic() - began_s < SOON_S
        assert generations.of("one", time.monotonic()) >= began


async def test_a_mesh_that_forgot_everything_is_told_by_the_file(valkey: Valkey, tmp_path: Path) -> None:
    path = tmp_path / "generations"
    async with running(valkey.url, path) as generations:
        generation = await clear(valkey.url, "one")
    valkey.restart(empty=True)
    async with running(valkey.url, path) as generations, running(valkey.url, name="g2") as second:
        assert generations.of("one", time.monotonic()) == generation
        await eventually(lambda: second.of("one", time.monotonic()) == generation)
        assert await clear(valkey.url, "one") > generation


async def test_a_file_that_cannot_be_written_does_not_hold_up_a_clearing(valkey: Valkey, tmp_path: Path) -> None:
    async with running(valkey.url, tmp_path / "missing" / "generations") as generations:
        generation = await clear(valkey.url, "one")
        assert generations.of("one", time.monotonic()) == generation


def test_a_file_that_means_nothing_stops_the_start(tmp_path: Path) -> None:
    path = tmp_path / "generations"
    path.write_text("{")
    with pytest.raises(ConfigurationError, match="generations_file"):
        TenantGenerations("redis://127.0.0.1:1/0", "g1", KEY, path)
