"""A client of a real Valkey, and tasks that end with the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.common.redis_client import RedisClient, connect_redis
from tests.support.valkey import Valkey


@pytest.fixture
async def client(valkey: Valkey) -> AsyncIterator[RedisClient]:
    client = connect_redis(valkey.url)
    yield client
    await client.aclose()


@pytest.fixture
async def tasks() -> AsyncIterator[asyncio.TaskGroup]:
    """A group whose tasks are cancelled at the end."""
    async with asyncio.TaskGroup() as group:
        yield group
        for task in list(group._tasks):
            task.cancel()
