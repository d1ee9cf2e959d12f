"""Tells the index which blocks a location holds; the only writer of the index.

`add`, `remove` and `clear` are synchronous and never wait; `run` carries what they leave in batches of a few
milliseconds. Each announcement has a sequence number and is repeated until Redis has answered, so that one that was
applied and not acknowledged is not applied twice. When Redis has lost the set or its lease, everything is announced
again from memory after a jittered pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import Iterable

import structlog
from opentelemetry import metrics

from services.common.announced_set import AnnouncedSet, Batch
from services.common.announcements import Header, Kind, Tier, pack_xor
from services.common.blocks import BlockId
from services.common.keys import KeySpace, location_key
from services.common.lua import LuaScript
from services.common.redis_client import REDIS_ERRORS, Backoff, RedisClient, RedisHealth
from services.common.registry import LEASE_S, REJOIN_JITTER_S, RENEW_S

__all__ = ["Announcer", "Tier"]

BATCH_DELAY_S = 0.003
# Announcements that a shard's change stream keeps (about 5 KB each at most).
STREAM_ENTRIES = 4096

_ANNOUNCE = LuaScript("announce")
_RETIRE = LuaScript("retire")
_APPLIED, _REPEATED, _SUPERSEDED = 1, 2, -1
_log = structlog.get_logger()
_meter = metrics.get_meter("kvmesh.announcer")
_batches = _meter.create_counter("kvmesh_announcements", description="Announcements applied, by kind.")
_full = _meter.create_counter("kvmesh_announcements_full", description="Whole sets announced, the first included.")


class Announcer:
    """Announces the blocks of one location and epoch: `run` until cancelled, then `close` to withdraw them."""

    def __init__(
        self,
        client: RedisClient,
        *,
        kind: str,
        location_id: str,
        epoch: int,
        keyspace: KeySpace | None = None,
        health: RedisHealth | None = None,
    ) -> None:
        self._client = client
        self._location = location_key(kind, location_id)
        self._epoch = epoch
        self._keys = (keyspace or KeySpace()).shard_of(self._location)
        self._health = health or RedisHealth()
        self._set = AnnouncedSet()
        self._seq = 0
        self._unanswered: Batch | None = None
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._superseded = False

    def __len__(self) -> int:
        """Blocks held now."""
        return len(self._set)

    @property
    def digest(self) -> tuple[int, int]:
        """Count and XOR of what has been announced."""
        return self._set.digest

    def add(self, ids: Iterable[BlockId], tier: Tier) -> None:
        """`ids`, in prefix order, are held in `tier` now."""
        self._set.add(ids, tier)
        self._changed()

    def remove(self, ids: Iterable[BlockId]) -> None:
        """`ids` are no longer held, descendants before their parents."""
        self._set.remove(ids)
        self._changed()

    def clear(self) -> None:
        """Nothing is held any more."""
        self._set.clear()
        self._unanswered = None
        self._changed()

    async def flushed(self, timeout_s: float) -> None:
        """Wait until the index knows everything. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._idle.wait()

    async def run(self) -> None:
        """Announce until cancelled."""
        backoff = Backoff()
        while True:
            try:
                pause_s = await self._announce()
                self._health.answered()
                backoff.reset()
            except REDIS_ERRORS as error:
                self._health.lost(error)
                pause_s = backoff.next_s()
            if pause_s:
                await asyncio.sleep(pause_s)

    async def close(self) -> None:
        """Withdraw everything; a Redis that does not answer leaves it to the lease."""
        keys, location = self._keys, self._location
        header = Header(self._epoch, self._seq + 1, Kind.RETIRE, 0, 0).pack()
        with contextlib.suppress(*REDIS_ERRORS):
            await _RETIRE(
                self._client,
                [keys.members, keys.meta(location), keys.blocks(location), keys.stage(location), keys.changes],
                [location, self._epoch, header, STREAM_ENTRIES],
            )

    def _changed(self) -> None:
        if self._set.pending:
            self._idle.clear()
            self._wake.set()

    async def _announce(self) -> float:
        """One round: send what is unanswered or new, or renew the lease. Returns how long to pause."""
        await self._wait_for_work()
        if self._unanswered is None:
            self._unanswered = self._set.next_batch()
            self._seq += self._unanswered is not None
        batch = self._unanswered
        status = await self._send(batch or Batch(Kind.CHANGE, b"", b"", *self._set.digest))
        if status in (_APPLIED, _REPEATED):
            self._acknowledge(batch)
            return 0.0
        return self._start_over(status)

    async def _wait_for_work(self) -> None:
        if self._unanswered is not None or self._set.pending:
            self._wake.clear()
            await asyncio.sleep(BATCH_DELAY_S)
            return
        self._idle.set()
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RENEW_S * random.uniform(0.8, 1.0)):
                await self._wake.wait()
            await asyncio.sleep(BATCH_DELAY_S)

    async def _send(self, batch: Batch) -> int:
        keys, location = self._keys, self._location
        header = Header(self._epoch, self._seq, batch.kind, batch.count, batch.xor)
        status, _incarnation = await _ANNOUNCE(
            self._client,
            [
                *(keys.incarnation, keys.members, keys.meta(location)),
                *(keys.blocks(location), keys.stage(location), keys.changes),
            ],
            [
                *(location, self._epoch, self._seq, int(batch.kind), batch.adds, batch.removes),
                *(batch.count, pack_xor(batch.xor), header.pack()),
                *(int(LEASE_S * 1000), STREAM_ENTRIES, secrets.token_hex(8)),
            ],
        )
        return int(status)

    def _acknowledge(self, batch: Batch | None) -> None:
        self._superseded = False
        if batch is None:
            return
        if self._unanswered is batch:
            self._unanswered = None
        _batches.add(1, {"kind": "staged" if batch.kind & Kind.STAGED else "change"})
        if batch.kind & Kind.COMMIT:
            _full.add(1)

    def _start_over(self, status: int) -> float:
        """The index has lost this location, or another epoch has it: announce everything after a pause."""
        self._unanswered = None
        self._set.announce_all()
        self._idle.clear()
        if status != _SUPERSEDED:
            return random.uniform(0, REJOIN_JITTER_S)
        if not self._superseded:
            _log.error("another process with a later epoch announces under this name", location=self._location)
        self._superseded = True
        return 1.0
