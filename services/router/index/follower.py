"""Keeps the replica equal to Redis: one task for each shard.

A task reads the shard's overview (locations, sequence numbers, digests), reads the sets it lacks, and follows the
change stream from the position noted before. Every two seconds it reads the overview again: what the stream should
have brought by then and did not, or a digest that differs, makes it read that location anew; a location whose lease
has ended is dropped. A shard without locations has neither to look for and is asked less often. After Redis was away
or came back empty nothing is dropped for the time that holders need to announce again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass
from typing import cast

import structlog
from opentelemetry import metrics

from services.common.announcements import Header, unpack_adds, unpack_xor
from services.common.blocks import BlockId, split_ids
from services.common.keys import KeySpace, ShardKeys
from services.common.lua import LuaScript
from services.common.redis_client import COMMAND_TIMEOUT_S, REDIS_ERRORS, Backoff, RedisClient, RedisHealth
from services.common.registry import FREEZE_S
from services.common.stream_entries import Position, entries_of, format_position, parse_position
from services.router.index.replica import Applied, Location, Replica

OVERVIEW_EVERY_S = 2.0
EMPTY_OVERVIEW_EVERY_S = 10.0
_READ_ENTRIES = 256
_SCAN_ENTRIES = 2_000
# What is applied between two yields to the event loop, about a millisecond's worth; an entry counts as so much more.
_YIELD_BYTES = 20_000
_ENTRY_BYTES = 200

_OVERVIEW = LuaScript("overview")
_log = structlog.get_logger()
_meter = metrics.get_meter("kvmesh.router.index")
_applied = _meter.create_counter("kvmesh_router_index_announcements", description="Announcements read, by result.")
_resyncs = _meter.create_counter("kvmesh_router_index_resyncs", description="Location sets read anew, by reason.")
_divergence = _meter.create_counter(
    "kvmesh_router_index_divergence", description="Times that a location's digest was not the holder's."
)


@dataclass(frozen=True, slots=True)
class _Holder:
    """What the overview says of one location."""

    epoch: int
    seq: int
    count: int
    xor: int


@dataclass(frozen=True, slots=True)
class _Overview:
    position: Position
    holders: dict[str, _Holder]
    # What the replica had of this shard when it was asked for.
    known: dict[str, tuple[int, int]]


class IndexFollower:
    """Feeds `replica` until cancelled; `synced` is set once every shard has been read."""

    def __init__(
        self,
        client: RedisClient,
        replica: Replica,
        *,
        keyspace: KeySpace | None = None,
        health: RedisHealth | None = None,
    ) -> None:
        self.replica = replica
        self.synced = asyncio.Event()
        _divergence.add(0)
        keyspace = keyspace or KeySpace()
        health = health or RedisHealth()
        self._shards = [_Shard(client, replica, keyspace, number, health) for number in range(keyspace.num_shards)]

    async def run(self) -> None:
        """Follow all shards."""
        async with asyncio.TaskGroup() as group:
            for shard in self._shards:
                group.create_task(shard.run())
            group.create_task(self._report_synced())

    async def _report_synced(self) -> None:
        for shard in self._shards:
            await shard.synced.wait()
        self.synced.set()


class _Shard:
    def __init__(
        self, client: RedisClient, replica: Replica, keyspace: KeySpace, number: int, health: RedisHealth
    ) -> None:
        self._client = client
        self._replica = replica
        self._keyspace = keyspace
        self._keys: ShardKeys = keyspace.shard(number)
        self._health = health
        self._incarnation: bytes | None = None
        self._position = (0, 0)
        self._frozen_until_s = 0.0
        self._overview: _Overview | None = None
        self.synced = asyncio.Event()

    async def run(self) -> None:
        backoff = Backoff()
        while True:
            try:
                await self._follow(backoff)
            except REDIS_ERRORS as error:
                self._health.lost(error)
                self._freeze()
                await asyncio.sleep(backoff.next_s())

    async def _follow(self, backoff: Backoff) -> None:
        await self._read_overview()
        while True:
            self._health.answered()
            backoff.reset()
            read_s = time.monotonic()
            while (wait_s := read_s + self._overview_every_s() - time.monotonic()) > 0:
                await self._read_changes(wait_s)
                if self._overview is not None and self._position >= self._overview.position:
                    await self._compare(self._overview)
                    self._overview = None
                    self.synced.set()
            await self._read_overview()

    def _overview_every_s(self) -> float:
        is_empty = self._overview is None and not self._own_locations()
        return EMPTY_OVERVIEW_EVERY_S if is_empty else OVERVIEW_EVERY_S

    async def _read_overview(self) -> None:
        keys = self._keys
        known = {name: (location.epoch, location.seq) for name, location in self._own_locations().items()}
        incarnation, position, found = await _OVERVIEW(
            self._client, [keys.incarnation, keys.members, keys.changes], [keys.meta_prefix, secrets.token_hex(8)]
        )
        if self._incarnation is None:
            self._position = parse_position(position)
        elif self._incarnation != incarnation:
            _log.warning("redis has lost the location index", shard=keys.shard)
            self._position = (0, 0)
            self._freeze()
        self._incarnation = incarnation
        holders = {
            name.decode(): _Holder(int(epoch), int(seq), int(count), unpack_xor(xor))
            for name, epoch, seq, count, xor in found
        }
        self._overview = _Overview(parse_position(position), holders, known)

    async def _read_changes(self, wait_s: float) -> None:
        """Apply what the stream has; while no overview is being caught up with, wait up to `wait_s` for something."""
        pending = self._overview is not None
        async with asyncio.timeout(COMMAND_TIMEOUT_S if pending else wait_s + COMMAND_TIMEOUT_S):
            reply = await self._client.xread(
                {self._keys.changes: format_position(self._position)},
                count=_READ_ENTRIES,
                block=None if pending else max(1, int(wait_s * 1000)),
            )
        entries = entries_of(reply)
        if pending and not entries and self._overview is not None:
            # Nothing more is to come up to the overview: it was trimmed, or we are there.
            self._position = max(self._position, self._overview.position)
        work = 0
        for position, fields in entries:
            await self._apply(fields)
            self._position = parse_position(position)
            work += _ENTRY_BYTES + len(fields[b"a"]) + len(fields[b"r"])
            if work > _YIELD_BYTES:
                work = 0
                await asyncio.sleep(0)
        while self._replica.blocks.sweep():  # noqa: ASYNC110 (yields between two steps of its own work)
            await asyncio.sleep(0)

    async def _apply(self, fields: dict[bytes, bytes]) -> None:
        name = fields[b"l"].decode()
        adds, removes = unpack_adds(fields[b"a"]), split_ids(fields[b"r"])
        result = self._replica.apply(name, Header.unpack(fields[b"h"]), adds, removes)
        _applied.add(1, {"result": result.value})
        if result is Applied.GAP:
            await self._resync(name, result.value)
        # One that has diverged is read anew at the next overview: at most once in that time, whatever the reason.

    async def _compare(self, overview: _Overview) -> None:
        """Repair what differs from the overview although everything up to it has been read."""
        for name, holder in overview.holders.items():
            location = self._replica.locations.get(name)
            if location is None or (location.epoch, location.seq) < (holder.epoch, holder.seq):
                await self._resync(name, "missed")
            elif _differs(location, holder):
                _divergence.add(1)
                await self._resync(name, "diverged")
        if time.monotonic() < self._frozen_until_s:
            return
        for name, version in overview.known.items():
            location = self._replica.locations.get(name)
            if name not in overview.holders and location is not None and (location.epoch, location.seq) == version:
                self._replica.retire(name)

    async def _resync(self, name: str, reason: str) -> None:
        """Read a location's set as Redis has it. The stream replays what changes meanwhile."""
        before = await self._read_meta(name)
        if before is None:
            return
        self._replica.begin_load(name, before[0])
        cursor = 0
        while True:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                reply = await self._client.hscan(self._keys.blocks(name), cursor, count=_SCAN_ENTRIES)
            cursor, part = cast("tuple[int, dict[bytes, bytes]]", reply)
            self._replica.load_part(name, [(BlockId(id_), tier[0]) for id_, tier in part.items()])
            if not cursor:
                break
        after = await self._read_meta(name)
        if after is not None and after[0] == before[0]:
            _resyncs.add(1, {"reason": reason})
            self._replica.end_load(name, before[1], verify_from=after[1])

    async def _read_meta(self, name: str) -> tuple[int, int] | None:
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            epoch, seq = await self._client.hmget(self._keys.meta(name), ["epoch", "seq"])
        return (int(epoch), int(seq)) if epoch is not None and seq is not None else None

    def _own_locations(self) -> dict[str, Location]:
        return {
            name: location
            for name, location in self._replica.locations.items()
            if self._keyspace.shard_of(name).shard == self._keys.shard
        }

    def _freeze(self) -> None:
        self._frozen_until_s = time.monotonic() + FREEZE_S


def _differs(location: Location, holder: _Holder) -> bool:
    """Whether a location that is as far as the holder's overview has another digest."""
    if (location.epoch, location.seq) != (holder.epoch, holder.seq) or location.staged is not None:
        return False
    return holder.seq >= location.verify_from and not location.agrees(holder.count, holder.xor)
