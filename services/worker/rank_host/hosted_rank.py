"""A rank process of somebody else's replica: started as its worker says, and what it says, until it has ended."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from kvmesh.v1 import rank_host_pb2

from services.worker.children import Child, kill, start_child
from services.worker.engine.config import EngineConfig
from services.worker.engine_messages import FromRankToFront

_MODULE = "services.worker.engine"


class HostedRank:
    """A running rank."""

    def __init__(self, child: Child, leaving: asyncio.Future[float]) -> None:
        """leaving: see Places."""
        self._child = child
        self._leaving = leaving

    @classmethod
    async def start(
        cls, role: str, config: EngineConfig, link: socket.socket, leaving: asyncio.Future[float]
    ) -> HostedRank:
        """config: complete, but for descriptors and the parent. link: to rank 0, given away."""
        front_end, child_end = socket.socketpair()
        assert config.ranks is not None
        with link:
            place = msgspec.structs.replace(config.ranks, link_fds=(link.fileno(),))
            child = await start_child(
                role,
                _MODULE,
                msgspec.json.encode(
                    msgspec.structs.replace(config, parent_pid=os.getpid(), front_fd=child_end.fileno(), ranks=place)
                ),
                front_end=front_end,
                child_end=child_end,
                fds=(link.fileno(),),
                receives=FromRankToFront,
                environment={},
            )
        return cls(child, leaving)

    async def events(self) -> AsyncIterator[rank_host_pb2.RankEvent]:
        """Its start, what it says, that the host is leaving, and its end."""
        yield rank_host_pb2.RankEvent(started=rank_host_pb2.RankStarted(pid=self._child.pid))
        hearing = asyncio.create_task(self._child.link.receive_all())
        try:
            waits: set[asyncio.Future[Any]] = {self._leaving, hearing}
            while True:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if self._leaving in waits and self._leaving.done():
                    waits.discard(self._leaving)
                    leaving = rank_host_pb2.RankLeaving(within_s=self._leaving.result())
                    yield rank_host_pb2.RankEvent(leaving=leaving)
                if hearing.done():
                    for message in hearing.result():
                        yield rank_host_pb2.RankEvent(message=msgspec.msgpack.encode(message))
                    waits.discard(hearing)
                    hearing = asyncio.create_task(self._child.link.receive_all())
                    waits.add(hearing)
        except ConnectionError:
            # The link closes as the process ends.
            await self._child.end()
            status = self._child.process.returncode or 0
            yield rank_host_pb2.RankEvent(ended=rank_host_pb2.RankEnded(status=status))
        finally:
            hearing.cancel()

    async def end(self) -> None:
        """At once: it holds nothing that anybody wants. Idempotent."""
        if self._child.process.returncode is None:
            kill(self._child)
        await self._child.end()
