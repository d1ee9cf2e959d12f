"""Places that several workers share, kept in Redis under leases: readers of the shared storage, holders of artifacts.

A place that is not renewed ends with its lease, so a worker that dies leaves nothing to clean up. Without Redis nobody
is kept from anything: a start must not depend on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable

import structlog
from opentelemetry import metrics

from services.common.keys import ArtifactKeys
from services.common.lua import LuaScript
from services.common.redis_client import COMMAND_TIMEOUT_S, REDIS_ERRORS, RedisClient

LEASE_S = 15.0
RENEW_S = 5.0
# Between two tries for a place; jittered, so that a fleet that starts at once does not ask at once.
_RETRY_S = 0.5
_HOLD = LuaScript("hold")
_HOLDERS = LuaScript("holders")
_log = structlog.get_logger()
_meter = metrics.get_meter("kvmesh.worker")
_reading = _meter.create_up_down_counter(
    "kvmesh_model_source_readers", description="1 while this worker reads the shared storage."
)


class SharedPlaces:
    """One worker's view of the places; name: its gRPC address, by which it takes them and others find it."""

    def __init__(self, client: RedisClient, keys: ArtifactKeys, name: Callable[[], str]) -> None:
        self._client = client
        self._keys = keys
        self._name = name

    async def try_read(self, limit: int) -> bool:
        """Take one of `limit` places of readers; True also where Redis does not answer."""
        try:
            taken = await _HOLD(self._client, [self._keys.readers], [self._name(), limit, _ms(LEASE_S)])
        except REDIS_ERRORS as error:
            _log.warning("the shared storage is read without a place: redis does not answer", error=str(error)[:100])
            return True
        return bool(taken)

    @contextlib.asynccontextmanager
    async def reading(self, limit: int) -> AsyncIterator[None]:
        """A place that has been taken, renewed until the end of the context."""
        renewal = asyncio.create_task(self._renew(self._keys.readers, limit))
        _reading.add(1)
        try:
            yield
        finally:
            _reading.add(-1)
            renewal.cancel()
            await asyncio.gather(renewal, return_exceptions=True)
            with contextlib.suppress(*REDIS_ERRORS):
                async with asyncio.timeout(COMMAND_TIMEOUT_S):
                    await self._client.zrem(self._keys.readers, self._name())

    async def holders(self, digest: str) -> list[str]:
        """Addresses of other workers that have an artifact, in random order; none where Redis does not answer."""
        try:
            found = await _HOLDERS(self._client, [self._keys.holders(digest)])
        except REDIS_ERRORS:
            return []
        addresses = [address.decode() for address in found if address.decode() != self._name()]
        random.shuffle(addresses)
        return addresses

    async def add_holder(self, digest: str) -> None:
        """Say once that this worker has an artifact: before it gives back a reader's place, so that who takes that
        place next finds it."""
        with contextlib.suppress(*REDIS_ERRORS):
            await _HOLD(self._client, [self._keys.holders(digest)], [self._name(), 0, _ms(LEASE_S)])

    async def announce(self, digest: str) -> None:
        """Say that this worker has an artifact, until cancelled; the place is then given back."""
        key = self._keys.holders(digest)
        try:
            await self._renew(key, 0)
        finally:
            with contextlib.suppress(*REDIS_ERRORS):
                async with asyncio.timeout(COMMAND_TIMEOUT_S):
                    await self._client.zrem(key, self._name())

    async def _renew(self, key: str, limit: int) -> None:
        while True:
            with contextlib.suppress(*REDIS_ERRORS):
                await _HOLD(self._client, [key], [self._name(), limit, _ms(LEASE_S)])
            await asyncio.sleep(RENEW_S * random.uniform(0.8, 1.0))


def retry_pause_s() -> float:
    """How long to wait before the next try for a place."""
    return _RETRY_S * random.uniform(0.5, 1.0)


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
