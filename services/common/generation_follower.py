"""Follows the generations of cleared tenants in Redis, carries them out, and says there how far it has come.

Whoever clears a tenant waits for every follower. A follower that finds less in Redis than it knows puts it back, so a
Redis that comes back empty loses no clearing as long as one follower lives. Nothing is asked of Redis for a request:
a change arrives by a blocking read.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import structlog
from opentelemetry import metrics

from services.common.generations import Generations
from services.common.keys import KeySpace
from services.common.lua import LuaScript
from services.common.redis_client import BLOCK_MS, COMMAND_TIMEOUT_S, REDIS_ERRORS, Backoff, RedisClient, RedisHealth

# A follower that was silent for longer is no longer waited for. It must have stopped relying on what it knows before.
FORGET_S = 600.0
_RETRY_S = 1.0
_MERGE_TENANTS = 1000

_FOLLOW = LuaScript("follow_generations")
_MERGE = LuaScript("merge_generations")
_LEAVE = LuaScript("leave_generations")
_log = structlog.get_logger()
_meter = metrics.get_meter("kvmesh.generations")
_followed = _meter.create_counter("kvmesh_generations_followed", description="Clearings of tenants carried out here.")
_failed = _meter.create_counter("kvmesh_generations_failed", description="Clearings that have to be tried again.")

# Told of the generations that are new; raises OSError when that could not be carried out whole.
CarryOut = Callable[[Mapping[bytes, int]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Found:
    incarnation: bytes
    revision: int
    position: bytes
    table: dict[bytes, int] | None


class GenerationFollower:
    """`run` until cancelled, then `close`. `generations` are those carried out."""

    def __init__(
        self,
        client: RedisClient,
        name: str,
        *,
        epoch: int,
        carry_out: CarryOut | None = None,
        generations: Generations | None = None,
        keyspace: KeySpace | None = None,
        health: RedisHealth | None = None,
    ) -> None:
        """name: such as "gateway/g1"; of two processes with one name the later epoch counts."""
        self.generations = generations or Generations()
        # Set once everything that Redis knew has been carried out, or tried.
        self.synced = asyncio.Event()
        # When Redis was last asked with success: what is known is no older than that.
        self.current_at_s = float("-inf")
        self._client = client
        self._name = name
        self._epoch = epoch
        self._carry_out = carry_out
        self._keys = (keyspace or KeySpace()).generations()
        self._health = health or RedisHealth()
        self._incarnation = b""
        self._revision = -1
        self._superseded = False

    async def run(self) -> None:
        """Follow until cancelled."""
        backoff = Backoff()
        while True:
            try:
                position = await self._catch_up()
                self._health.answered()
                backoff.reset()
                if position is None:
                    await asyncio.sleep(_RETRY_S)
                    continue
                async with asyncio.timeout(COMMAND_TIMEOUT_S):
                    await self._client.xread({self._keys.changes: position}, count=1, block=BLOCK_MS)
            except REDIS_ERRORS as error:
                self._health.lost(error)
                await asyncio.sleep(backoff.next_s())

    async def close(self) -> None:
        """Nobody need wait for this follower any more; best effort."""
        with contextlib.suppress(*REDIS_ERRORS):
            await _LEAVE(self._client, [self._keys.followers], [self._name, self._epoch])

    async def _catch_up(self) -> bytes | None:
        """Carry out what is new and say so. Returns where the stream stands, None when something is left to do."""
        while True:
            began_s = time.monotonic()
            found = await self._ask()
            if found is None:
                return None
            if found.table is None:
                self.current_at_s = began_s
                return found.position
            beyond = self.generations.beyond(found.table)
            if beyond:
                await self._put_back(beyond)
            done = await self._do({**found.table, **beyond})
            self.synced.set()
            if not done:
                return None
            self._incarnation, self._revision = found.incarnation, found.revision

    async def _ask(self) -> _Found | None:
        keys = self._keys
        answer = await _FOLLOW(
            self._client,
            [keys.incarnation, keys.table, keys.revision, keys.changes, keys.followers],
            [self._name, self._epoch, self._incarnation, self._revision],
        )
        if answer is None:
            if not self._superseded:
                _log.error("another process with a later epoch has this name", follower=self._name)
            self._superseded = True
            return None
        incarnation, revision, position, flat = answer
        table = None if flat is None else dict(zip(flat[::2], map(int, flat[1::2]), strict=True))
        return _Found(incarnation, int(revision), position, table)

    async def _put_back(self, beyond: Mapping[bytes, int]) -> None:
        _log.warning("redis lacked generations of tenants", tenants=len(beyond))
        keys, pairs = self._keys, iter(beyond.items())
        while part := list(itertools.islice(pairs, _MERGE_TENANTS)):
            arguments = [value for pair in part for value in pair]
            await _MERGE(self._client, [keys.table, keys.revision, keys.changes], arguments)

    async def _do(self, table: Mapping[bytes, int]) -> bool:
        """Whether everything in `table` is carried out now."""
        new = {tag: generation for tag, generation in table.items() if generation > self.generations.of(tag)}
        if new and self._carry_out is not None:
            try:
                await self._carry_out(new)
            except OSError as error:
                _failed.add(1)
                _log.error("clearing a tenant must be tried again", error=f"{type(error).__name__}: {error}")
                return False
        self.generations.merge(new)
        if new:
            _followed.add(len(new))
            _log.info("generations of tenants were raised", tenants=len(new))
        return True
