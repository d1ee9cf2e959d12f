"""Channels to workers and their Serve streams, one for each address, kept while used and for some time after."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass

import grpc.aio
from kvmesh.v1.worker_pb2_grpc import WorkerStub

from services.common.rpc import open_channel
from services.common.security import MeshSecret
from services.gateway.pulse import Pulse
from services.gateway.worker_link import WorkerLink

_IDLE_S = 300.0
_SWEEP_S = 30.0


@dataclass(slots=True)
class _Entry:
    channel: grpc.aio.Channel
    stub: WorkerStub
    link: WorkerLink | None = None
    users: int = 0
    idle_since_s: float = 0.0


class WorkerChannels:
    """Owner of the channels. Every `acquire` is followed by one `release`."""

    def __init__(self, secret: MeshSecret, pulse: Pulse, *, silence_s: float) -> None:
        """silence_s: of a worker's stream with attempts, before it is left."""
        self._secret = secret
        self._pulse = pulse
        self._silence_s = silence_s
        self._num_users = 0
        # Of links that are no more.
        self._late_events = self._silent_links = 0
        self._entries: dict[str, _Entry] = {}
        # Streams serve many requests: they are opened in no request's context.
        self._context = contextvars.copy_context()

    def acquire(self, address: str) -> WorkerLink:
        """An open stream to the worker at `address`."""
        entry = self._entries.get(address)
        if entry is None:
            channel = open_channel(address)
            entry = self._entries[address] = _Entry(channel, WorkerStub(channel))
        if entry.link is None or not entry.link.is_open:
            self._forget(entry.link)
            entry.link = self._context.run(WorkerLink, entry.stub, self._secret, self._silence_s)
        entry.users += 1
        self._num_users += 1
        self._pulse.add(self)
        return entry.link

    def release(self, address: str, now_s: float) -> None:
        """One user less."""
        entry = self._entries[address]
        entry.users -= 1
        entry.idle_since_s = now_s
        self._num_users -= 1
        if not self._num_users:
            self._pulse.discard(self)

    def pulse(self, now_s: float) -> None:
        """Have every link look for silence. now_s: monotonic time."""
        for link in self._links():
            link.pulse(now_s)

    def users(self) -> int:
        """Attempts that hold a channel; 0 when idle."""
        return self._num_users

    @property
    def late_events(self) -> int:
        """What workers have said of attempts that nobody wanted any more, and was dropped."""
        return self._late_events + sum(link.late_events for link in self._links())

    @property
    def silent_links(self) -> int:
        """Links that were left for their silence."""
        return self._silent_links + sum(link.is_silent for link in self._links())

    async def sweep(self) -> None:
        """Close channels that nobody has used for some minutes, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SWEEP_S)
            idle = [a for a, e in self._entries.items() if not e.users and loop.time() - e.idle_since_s > _IDLE_S]
            for address in idle:
                self._forget(self._entries[address].link)
                await _close(self._entries.pop(address))

    def _links(self) -> Iterator[WorkerLink]:
        return (entry.link for entry in self._entries.values() if entry.link is not None)

    def _forget(self, link: WorkerLink | None) -> None:
        if link is not None:
            self._late_events += link.late_events
            self._silent_links += link.is_silent

    async def close(self) -> None:
        """Close all."""
        while self._entries:
            await _close(self._entries.popitem()[1])


async def _close(entry: _Entry) -> None:
    if entry.link is not None:
        entry.link.close()
    await entry.channel.close(None)
