"""Who is in the mesh: one leased record for each location, and a watcher that learns of changes at once.

A `Registrar` keeps its process's record alive and puts it back after Redis has lost it. A `RegistryWatcher` holds the
records in memory. Losing Redis, or a Redis that comes back empty, drops nobody: known records stay until their
holders have had a lease's time to register again. The record says where a process is, never whether it is well.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec
import structlog
from opentelemetry import metrics

from services.common.keys import KeySpace, life_key, location_key
from services.common.lua import LuaScript
from services.common.redis_client import BLOCK_MS, COMMAND_TIMEOUT_S, REDIS_ERRORS, Backoff, RedisClient, RedisHealth

LEASE_S = 10.0
RENEW_S = 3.0
# How long known records outlive a Redis that forgot them: a lease, and the jitter of the holders.
FREEZE_S = LEASE_S + 2.0
REJOIN_JITTER_S = 0.5
_SNAPSHOT_EVERY_S = 2.0
_COALESCE_S = 0.02

_REGISTER = LuaScript("register")
_WITHDRAW = LuaScript("withdraw")
_REGISTRY = LuaScript("registry")
_log = structlog.get_logger()
_unreadable = metrics.get_meter("kvmesh.registry").create_up_down_counter(
    "kvmesh_registry_unreadable_records", description="Records that this release cannot read and passes over."
)


class LocationRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a location is. Addresses are "host:port", empty where there is none; model_digest is hex."""

    kind: Literal["worker", "kvstore"]
    id: str
    epoch: int
    host: str
    grpc_address: str
    pull_address: str = ""
    transfer_grpc_address: str = ""
    metrics_address: str = ""
    model: str = ""
    model_digest: str = ""
    started_s: int = 0
    release: str = ""

    @property
    def location(self) -> str:
        """Its name in the index, such as "worker/w1"."""
        return location_key(self.kind, self.id)

    @property
    def life(self) -> str:
        """The same with its epoch."""
        return life_key(self.kind, self.id, self.epoch)


_decoder = msgspec.msgpack.Decoder(LocationRecord)


class RegistryChange(msgspec.Struct, frozen=True):
    """A record that is new or changed, or (`gone`) no longer there."""

    record: LocationRecord
    gone: bool = False


def new_epoch() -> int:
    """A number larger than that of any earlier start: microseconds of wall time."""
    return time.time_ns() // 1000


async def read_registry(client: RedisClient, *, keyspace: KeySpace | None = None) -> list[LocationRecord]:
    """Who is registered now. Raises one of REDIS_ERRORS."""
    keys = (keyspace or KeySpace()).registry()
    _, _, packed = await _REGISTRY(
        client, [keys.incarnation, keys.members, keys.changes], [keys.record_prefix, secrets.token_hex(8)]
    )
    return _read(packed)[0]


def _read(packed: Iterable[bytes]) -> tuple[list[LocationRecord], int]:
    """The records, and how many were passed over since they cannot be read, as the kinds of a later release cannot."""
    records, num_unreadable = [], 0
    for one in packed:
        try:
            records.append(_decoder.decode(one))
        except msgspec.DecodeError:
            num_unreadable += 1
    return records, num_unreadable


class Registrar:
    """Keeps one record registered: `run` until cancelled, then `close` to withdraw it."""

    def __init__(
        self,
        client: RedisClient,
        record: LocationRecord,
        *,
        keyspace: KeySpace | None = None,
        health: RedisHealth | None = None,
    ) -> None:
        self._client = client
        self._record = record
        self._keys = (keyspace or KeySpace()).registry()
        self._health = health or RedisHealth()
        self._changed = asyncio.Event()
        self._rejected = False
        self.registered = asyncio.Event()

    def update(self, record: LocationRecord) -> None:
        """Replace the record; it is written at once. The location must be the same."""
        if record.location != self._record.location:
            raise ValueError(f"{record.location} is not {self._record.location}")
        self._record = record
        self._changed.set()

    async def run(self) -> None:
        """Register and renew until cancelled."""
        backoff = Backoff()
        while True:
            self._changed.clear()
            try:
                status = await self._register()
                self._health.answered()
                backoff.reset()
                pause_s = RENEW_S * random.uniform(0.8, 1.0) if status >= 0 else 1.0
            except REDIS_ERRORS as error:
                self._health.lost(error)
                pause_s = backoff.next_s()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()

    async def close(self) -> None:
        """Withdraw the record; a Redis that does not answer leaves it to the lease."""
        keys, record = self._keys, self._record
        with contextlib.suppress(*REDIS_ERRORS):
            await _WITHDRAW(
                self._client,
                [keys.members, keys.changes, keys.record(record.location)],
                [record.location, record.epoch],
            )
        self.registered.clear()

    async def _register(self) -> int:
        keys, record = self._keys, self._record
        status = int(
            await _REGISTER(
                self._client,
                [keys.incarnation, keys.members, keys.changes, keys.record(record.location)],
                [record.location, record.epoch, msgspec.msgpack.encode(record), _lease_ms(), secrets.token_hex(8)],
            )
        )
        if status >= 0:
            self.registered.set()
        elif not self._rejected:
            _log.error("another process with a later epoch has this name", location=record.location)
        self._rejected = status < 0
        return status


class RegistryWatcher:
    """The records of the mesh in memory, kept current by `run`."""

    def __init__(
        self, client: RedisClient, *, keyspace: KeySpace | None = None, health: RedisHealth | None = None
    ) -> None:
        self._client = client
        self._keys = (keyspace or KeySpace()).registry()
        self._health = health or RedisHealth()
        self._callbacks: list[Callable[[RegistryChange], None]] = []
        self._incarnation: bytes | None = None
        self._frozen_until_s = 0.0
        self._num_unreadable = 0
        self.records: dict[str, LocationRecord] = {}
        self.synced = asyncio.Event()

    def subscribe(self, callback: Callable[[RegistryChange], None]) -> None:
        """Have `callback` called for each change, and at once for every record known already."""
        self._callbacks.append(callback)
        for record in list(self.records.values()):
            callback(RegistryChange(record))

    def unsubscribe(self, callback: Callable[[RegistryChange], None]) -> None:
        """Call `callback` no more. Idempotent."""
        if callback in self._callbacks:
            self._callbacks.remove(callback)

    async def run(self) -> None:
        """Follow the registry until cancelled."""
        backoff = Backoff()
        while True:
            try:
                await self._follow(backoff)
            except REDIS_ERRORS as error:
                self._health.lost(error)
                self._freeze()
                await asyncio.sleep(backoff.next_s())

    async def _follow(self, backoff: Backoff) -> None:
        while True:
            position = await self._snapshot()
            self._health.answered()
            backoff.reset()
            self.synced.set()
            await self._wait_for_change(position)

    async def _snapshot(self) -> bytes:
        keys = self._keys
        incarnation, position, packed = await _REGISTRY(
            self._client, [keys.incarnation, keys.members, keys.changes], [keys.record_prefix, secrets.token_hex(8)]
        )
        if self._incarnation not in (None, incarnation):
            self._freeze()
        self._incarnation = incarnation
        records, num_unreadable = _read(packed)
        self._note_unreadable(num_unreadable)
        self._apply(records)
        return bytes(position)

    async def _wait_for_change(self, position: bytes) -> None:
        """Until the stream has something after `position`, or it is time to look for ended leases."""
        deadline_s = time.monotonic() + _SNAPSHOT_EVERY_S
        while time.monotonic() < deadline_s:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                if await self._client.xread({self._keys.changes: position}, count=1, block=BLOCK_MS):
                    await asyncio.sleep(_COALESCE_S)
                    return

    def _apply(self, present: list[LocationRecord]) -> None:
        by_location = {record.location: record for record in present}
        for location, record in by_location.items():
            if self.records.get(location) != record:
                self.records[location] = record
                self._notify(RegistryChange(record))
        if time.monotonic() < self._frozen_until_s:
            return
        for location in self.records.keys() - by_location.keys():
            self._notify(RegistryChange(self.records.pop(location), gone=True))

    def _note_unreadable(self, count: int) -> None:
        if count != self._num_unreadable:
            _unreadable.add(count - self._num_unreadable)
            _log.warning("records of the registry cannot be read", count=count)
            self._num_unreadable = count

    def _notify(self, change: RegistryChange) -> None:
        for callback in self._callbacks:
            callback(change)

    def _freeze(self) -> None:
        self._frozen_until_s = time.monotonic() + FREEZE_S


def _lease_ms() -> int:
    return int(LEASE_S * 1000)
