"""Keeps the control table and Redis alike: watches for changes, makes those of operators, puts back what Redis lost.

Nothing is polled: a change arrives by a blocking read. A Redis that comes back empty gets from each router what that
one knew, and the newest of each entry stays.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Mapping

import structlog
from opentelemetry import metrics

from services.common.keys import KeySpace
from services.common.lua import LuaScript
from services.common.redis_client import BLOCK_MS, COMMAND_TIMEOUT_S, REDIS_ERRORS, Backoff, RedisClient, RedisHealth
from services.router.control.table import ControlTable, Entry
from services.router.errors import ConflictError, FailedPreconditionError, RedisSilentError

MAX_ENTRIES = 10_000
PRUNE_EVERY_S = 600.0
_TRIES = 4
_BATCH = 500

_READ = LuaScript("control_read")
_PUT = LuaScript("control_put")
_MERGE = LuaScript("control_merge")
_PRUNE = LuaScript("control_prune")
_log = structlog.get_logger()
_meter = metrics.get_meter("kvmesh.router")
_changes = _meter.create_counter("kvmesh_router_control_changes", description="Changes made here for operators.")
_put_back = _meter.create_counter(
    "kvmesh_router_control_put_back", description="Entries of operators that Redis had lost and got back from here."
)


class ControlFollower:
    """`run` until cancelled; `table` is what applies."""

    def __init__(
        self,
        client: RedisClient,
        table: ControlTable,
        *,
        epochs: Callable[[], Mapping[str, int]],
        on_change: Callable[[], None],
        keyspace: KeySpace | None = None,
        health: RedisHealth | None = None,
    ) -> None:
        """epochs: those of the workers that are there. on_change: called when something new applies."""
        self.table = table
        # Set once what Redis has applies.
        self.synced = asyncio.Event()
        self._client = client
        self._epochs = epochs
        self._on_change = on_change
        self._keys = (keyspace or KeySpace()).control()
        self._health = health or RedisHealth()
        self._known = (b"", b"")
        self._lock = asyncio.Lock()

    async def run(self) -> None:
        """Follow until cancelled."""
        backoff, prune_at_s = Backoff(), time.monotonic() + PRUNE_EVERY_S
        while True:
            try:
                position = await self._catch_up()
                self._health.answered()
                backoff.reset()
                self.synced.set()
                if time.monotonic() > prune_at_s:
                    prune_at_s = time.monotonic() + PRUNE_EVERY_S
                    await self._prune()
                async with asyncio.timeout(COMMAND_TIMEOUT_S):
                    await self._client.xread({self._keys.changes: position}, count=1, block=BLOCK_MS)
            except REDIS_ERRORS as error:
                self._health.lost(error)
                await asyncio.sleep(backoff.next_s())

    async def change(self, key: str, edit: Callable[[bytes | None], bytes]) -> None:
        """Replace the payload of an entry by what `edit` makes of it; applies here when this returns.

        Raises what `edit` raises, RedisSilentError, ConflictError, or FailedPreconditionError when the table is full.
        """
        try:
            for _ in range(_TRIES):
                await self._catch_up_anew()
                if await self._put(key, self.table.entries.get(key), edit):
                    await self._catch_up()
                    _changes.add(1)
                    return
        except REDIS_ERRORS as error:
            # A command that timed out may still have been carried out.
            detail = f"redis does not answer ({type(error).__name__}): look at what applies before trying again"
            raise RedisSilentError(detail) from None
        raise ConflictError("somebody else is changing the same: try again")

    async def _put(self, key: str, before: Entry | None, edit: Callable[[bytes | None], bytes]) -> bool:
        """Whether the entry is as wanted now; False when another change came between."""
        payload = edit(before.payload if before else None)
        if before is not None and payload == before.payload:
            return True
        known = before.version if before else 0
        keys = self._keys
        version = int(
            await _PUT(self._client, [keys.table, keys.revision, keys.changes], [key, known, payload, MAX_ENTRIES])
        )
        if version < 0:
            raise FailedPreconditionError(f"the control table is full ({MAX_ENTRIES} entries)")
        return version > 0

    async def _catch_up_anew(self) -> None:
        """The same for an operator: a connection that a restart of Redis has broken shows only when it is used."""
        try:
            await self._catch_up()
        except REDIS_ERRORS:
            await self._catch_up()

    async def _catch_up(self) -> bytes:
        """Have what Redis has, and Redis what only this router has. Returns where the stream of changes stands."""
        async with self._lock:
            while True:
                known, position, now_us, found = await self._read()
                if found is None:
                    return position
                beyond = self.table.beyond(found, self._epochs(), now_us)
                if beyond:
                    await self._give_back(beyond)
                    continue
                self._known = known
                if self.table.replace(found):
                    _log.info("control state applies", entries=len(found), drained_workers=len(self.table.drains))
                    self._on_change()
                return position

    async def _read(self) -> tuple[tuple[bytes, bytes], bytes, int, dict[str, Entry] | None]:
        """Incarnation and revision, where the stream stands, the time, and the table unless it is known already."""
        keys = self._keys
        incarnation, revision, position, now_us, flat = await _READ(
            self._client,
            [keys.incarnation, keys.table, keys.revision, keys.changes],
            [*self._known, secrets.token_hex(8)],
        )
        pairs = None if flat is None else zip(flat[::2], flat[1::2], strict=True)
        found = None if pairs is None else {key.decode(): Entry.parse(one) for key, one in pairs}
        return (incarnation, revision), position, int(now_us), found

    async def _give_back(self, entries: Mapping[str, Entry]) -> None:
        _log.warning("redis lacked what operators had set", entries=len(entries))
        _put_back.add(len(entries))
        await self._send(_MERGE, ((key, entry.stored()) for key, entry in entries.items()))

    async def _prune(self) -> None:
        _, _, now_us, _ = await self._read()
        await self._send(_PRUNE, self.table.over(self._epochs(), now_us).items())

    async def _send(self, script: LuaScript, pairs: Iterable[tuple[str, bytes | int]]) -> None:
        keys, left = self._keys, iter(pairs)
        while part := list(itertools.islice(left, _BATCH)):
            arguments = [value for pair in part for value in pair]
            await script(self._client, [keys.table, keys.revision, keys.changes], arguments)
