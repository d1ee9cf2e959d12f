"""What a kvstore node takes at one moment: memory, files, SSD, Redis."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from kvmesh.v1 import kvstore_pb2

from bench.process_memory import numbers_of
from services.common.keys import KeySpace, location_key
from services.common.redis_client import COMMAND_TIMEOUT_S, connect_redis

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Sample:
    """Of one moment. anonymous: what the process has for itself, without the memory of the blocks."""

    rss_mib: float = 0.0
    pss_mib: float = 0.0
    anonymous_mib: float = 0.0
    threads: int = 0
    open_files: int = 0
    ssd_files: int = 0
    ssd_mib: float = 0.0
    redis_mib: float = 0.0
    redis_keys: int = 0
    redis_blocks: int = 0
    redis_changes: int = 0
    ram_blocks: int = 0
    ssd_blocks: int = 0
    open_leases: int = 0

    def highest(self, other: Sample) -> Sample:
        """The higher of each."""
        return Sample(*(max(getattr(self, one.name), getattr(other, one.name)) for one in fields(Sample)))


class Probe:
    """Samples a node. Close it."""

    def __init__(self, pid: int, ssd_path: Path, redis_url: str, instance: str) -> None:
        self._pid = pid
        self._ssd_path = ssd_path
        self._redis = connect_redis(redis_url)
        location = location_key("kvstore", instance)
        shard = KeySpace().shard_of(location)
        self._blocks_key, self._changes_key = shard.blocks(location), shard.changes

    async def sample(self, stats: kvstore_pb2.StatsResponse) -> Sample:
        """Now; `stats` are the node's own."""
        rollup = numbers_of(Path(f"/proc/{self._pid}/smaps_rollup"))
        status = numbers_of(Path(f"/proc/{self._pid}/status"))
        files = list(_files(self._ssd_path))
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            memory = await self._redis.info("memory")
            num_keys = await self._redis.dbsize()
            num_blocks = await self._redis.hlen(self._blocks_key)
            num_changes = await self._redis.xlen(self._changes_key)
        return Sample(
            rss_mib=rollup["Rss"] / 1024,
            pss_mib=rollup["Pss"] / 1024,
            anonymous_mib=status["RssAnon"] / 1024,
            threads=status["Threads"],
            open_files=len(os.listdir(f"/proc/{self._pid}/fd")),
            ssd_files=len(files),
            ssd_mib=sum(file.st_blocks for file in files) * 512 / _MIB,
            redis_mib=memory["used_memory"] / _MIB,
            redis_keys=num_keys,
            redis_blocks=num_blocks,
            redis_changes=num_changes,
            ram_blocks=stats.ram_blocks,
            ssd_blocks=stats.ssd.blocks,
            open_leases=stats.open_leases,
        )

    async def close(self) -> None:
        """Close the connection."""
        await self._redis.aclose()


def _files(folder: Path) -> Iterator[os.stat_result]:
    """Those that are not deleted meanwhile."""
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):
            yield entry.stat()
