"""Channels to workers, one for each address, kept while used and for some time after."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc.aio
from kvmesh.v1.worker_pb2_grpc import WorkerStub

from services.common.rpc import open_channel

_IDLE_S = 300.0
_SWEEP_S = 30.0


@dataclass(slots=True)
class _Entry:
    channel: grpc.aio.Channel
    stub: WorkerStub
    users: int = 0
    idle_since_s: float = 0.0


class WorkerChannels:
    """Owner of the channels. Every `acquire` is followed by one `release`."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def acquire(self, address: str) -> WorkerStub:
        """A stub for the worker at `address`."""
        entry = self._entries.get(address)
        if entry is None:
            channel = open_channel(address)
            entry = self._entries[address] = _Entry(channel, WorkerStub(channel))
        entry.users += 1
        return entry.stub

    def release(self, address: str, now_s: float) -> None:
        """One user less."""
        entry = self._entries[address]
        entry.users -= 1
        entry.idle_since_s = now_s

    def users(self) -> int:
        """Calls that hold a channel; 0 when idle."""
        return sum(entry.users for entry in self._entries.values())

    async def sweep(self) -> None:
        """Close channels that nobody has used for some minutes, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SWEEP_S)
            idle = [a for a, e in self._entries.items() if not e.users and loop.time() - e.idle_since_s > _IDLE_S]
            for address in idle:
                await self._entries.pop(address).channel.close(None)

    async def close(self) -> None:
        """Close all."""
        while self._entries:
            await self._entries.popitem()[1].channel.close(None)
