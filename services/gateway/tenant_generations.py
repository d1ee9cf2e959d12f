"""The generation of each caller's tenant, as cleared by operators: part of the ids and of the owner of its blocks.

A gateway that has not heard from Redis for long cannot know of new clearings. It then uses a generation of its own,
made up at that moment, under which no older block can be reached: it goes on serving, and shares no cache meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path

import structlog

from services.common.blocks import tenant_tag
from services.common.generation_file import load_generations, save_generations
from services.common.generation_follower import FORGET_S, GenerationFollower
from services.common.generations import Generations
from services.common.redis_client import RedisClient, RedisHealth, connect_redis
from services.common.registry import new_epoch
from services.common.settings import ConfigurationError

# Half of the time for which whoever clears a tenant waits for a silent gateway or reports it.
ALONE_AFTER_S = FORGET_S / 2
# Longest that a start waits for Redis to answer or to refuse.
_START_WAIT_S = 3.0
_log = structlog.get_logger("gateway.generations")


class TenantGenerations:
    """`run` until cancelled, then `close`. client: the gateway's connection to Redis, for other parts too."""

    def __init__(self, redis_url: str, instance: str, block_key: bytes, path: Path | None = None) -> None:
        """path: a file that keeps them. Raises ConfigurationError when it cannot be read, or for a wrong URL."""
        self._path = path
        self._block_key = block_key
        self._health = RedisHealth()
        self.client: RedisClient = connect_redis(redis_url)
        self._follower = GenerationFollower(
            self.client,
            f"gateway/{instance}",
            epoch=new_epoch(),
            carry_out=self._keep,
            generations=_load(path),
            health=self._health,
        )
        self._own = 0

    def of(self, tenant: str, now_s: float) -> int:
        """The generation of a tenant's requests. now_s: monotonic time."""
        if now_s - self._follower.current_at_s > ALONE_AFTER_S:
            if not self._own:
                self._own = new_epoch()
                _log.warning("redis is silent: the cache is not shared until it answers", generation=self._own)
            return self._own
        if self._own:
            self._own = 0
            _log.info("the generations of tenants are known again")
        return self._follower.generations.of(tenant_tag(self._block_key, tenant))

    async def run(self) -> None:
        """Follow until cancelled."""
        await self._follower.run()

    async def started(self) -> None:
        """Wait until Redis has told what it knows, or does not answer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_START_WAIT_S):
                await self._health.tried.wait()

    async def close(self) -> None:
        """Nobody need wait for this gateway any more."""
        await self._follower.close()
        await self.client.aclose()

    async def _keep(self, new: Mapping[bytes, int]) -> None:
        """They hold from now on; a file that cannot be written only means that they may be lost with the mesh."""
        self._follower.generations.merge(new)
        if self._path is None:
            return
        try:
            await asyncio.to_thread(save_generations, self._path, self._follower.generations)
        except OSError as error:
            _log.error("generations are not kept", path=str(self._path), error=error.strerror)


def _load(path: Path | None) -> Generations:
    if path is None:
        return Generations()
    try:
        return load_generations(path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"gateway: generations_file={path}: {error}") from None
