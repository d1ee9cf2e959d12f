"""The engines of a replica: the one that the front talks to, and the other ranks where a group computes together.

They start at the same time and are ready together; the first that fails says why. On this host all are children of the
front and end with it. What they talk over is made here and inherited: a socket from the engine to each rank, and an
empty file in which the ranks find each other. Ranks on other hosts are children of rank hosts, which call back
(rank_calls.py).
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from kvmesh.v1 import rank_host_pb2

from services.common.release import RELEASE
from services.common.security import MeshSecret
from services.worker.children import Child, Part, start_child
from services.worker.config import WorkerSettings
from services.worker.engine.config import EngineConfig, RankConfig, SpreadConfig
from services.worker.engine_messages import FromEngineToFront, FromRankToFront
from services.worker.errors import RankLost, StartFailed
from services.worker.rank_calls import RankCalls, address_of, listening, reachable_host
from services.worker.remote_rank import Leaving, RemoteRank

_MODULE = "services.worker.engine"
_CAUSE_TIMEOUT_S = 2.0
_CALL_TIMEOUT_S = 5.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Engines:
    """ranks: those other than the engine, rank 0, in their order. leaving: told when a rank host is about to stop."""

    engine: Part
    ranks: tuple[Part, ...] = ()
    leaving: Leaving = field(default_factory=Leaving)


@dataclass(frozen=True, slots=True)
class ReplicaName:
    """What rank hosts are told of a replica."""

    worker_id: str
    epoch: int
    model: str
    secret: MeshSecret


async def start_engines(
    settings: WorkerSettings, config: EngineConfig, fds: tuple[int, ...], name: ReplicaName, stack: AsyncExitStack
) -> Engines:
    """All ranks, which `stack` ends.

    config: of an engine that is alone, but for its front_fd. fds: further descriptors that it inherits. Raises
    StartFailed.
    """
    parts: list[Part] = []
    stack.push_async_callback(_end_all, parts)
    if settings.num_ranks == 1:
        parts.append(await _start("engine", config, fds, FromEngineToFront))
        return Engines(parts[0])
    config = msgspec.structs.replace(config, threads=rank_threads(settings))
    group = _Group(settings, config, name, Leaving())
    # Before those here, with which they would go as if they had died.
    stack.push_async_callback(_end_all, group.others)
    async with AsyncExitStack() as links:
        if settings.rank_hosts:
            await group.meet_others(links)
        group.make_links(links)
        local = [await group.start_engine(fds)]
        parts += local
        for rank in range(1, local_ranks(settings)):
            local.append(await group.start_rank(rank))
            parts.append(local[-1])
    return Engines(local[0], (*local[1:], *group.others), group.leaving)


def local_ranks(settings: WorkerSettings) -> int:
    """Ranks on this host; the same number is on each rank host."""
    return settings.num_ranks // (1 + len(settings.rank_hosts))


def rank_threads(settings: WorkerSettings) -> int:
    """Compute threads of each process on this host."""
    return max(1, (settings.threads or os.cpu_count() or 1) // local_ranks(settings))


async def together(*waits: Coroutine[Any, Any, Any]) -> list[Any]:
    """Their results. Raises StartFailed when one fails; the others are cancelled.

    Ranks that only lost another one leave it a moment to say why it went.
    """
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [task for task in done if task.exception()]
        if failed and all(map(_lost_another, failed)):
            await asyncio.wait(tasks, timeout=_CAUSE_TIMEOUT_S)
            failed = [task for task in tasks if task.done() and task.exception()]
        for task in sorted(failed, key=_lost_another):
            task.result()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def unless_leaving(leaving: Leaving, work: Coroutine[Any, Any, T]) -> T:
    """Its result. Raises StartFailed, the work being cancelled, when a rank host is about to stop."""
    task, told = asyncio.create_task(work), asyncio.create_task(leaving.wait())
    try:
        await asyncio.wait({task, told}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise StartFailed(f"rank host {leaving.host} is stopping")
        return task.result()
    finally:
        task.cancel()
        told.cancel()
        await asyncio.gather(task, told, return_exceptions=True)


def _lost_another(task: asyncio.Future[Any]) -> bool:
    error = task.exception()
    return isinstance(error, StartFailed) and error.kind == RankLost.__name__


async def _start(role: str, config: EngineConfig, fds: tuple[int, ...], receives: object) -> Child:
    front_end, child_end = socket.socketpair()
    config = msgspec.structs.replace(config, front_fd=child_end.fileno())
    return await start_child(
        role,
        _MODULE,
        msgspec.json.encode(config),
        front_end=front_end,
        child_end=child_end,
        fds=fds,
        receives=receives,
        environment={},
    )


async def _end_all(parts: Sequence[Part]) -> None:
    await asyncio.gather(*(part.end() for part in parts))


class _Group:
    """Makes what a group inherits, and starts its ranks. This process's copies close when all have theirs: a peer's end
    then shows.
    """

    def __init__(self, settings: WorkerSettings, config: EngineConfig, name: ReplicaName, leaving: Leaving) -> None:
        self.leaving = leaving
        self.others: list[RemoteRank] = []
        self._settings = settings
        self._config = config
        self._name = name
        self._spread: SpreadConfig | None = None
        self._store_fd = -1
        # By rank: rank 0's end, and on this host the rank's.
        self._engine_ends: dict[int, socket.socket] = {}
        self._rank_ends: dict[int, socket.socket] = {}

    async def meet_others(self, links: AsyncExitStack) -> None:
        """Start the ranks on other hosts, and have their links. Raises StartFailed."""
        settings = self._settings
        host = reachable_host(settings)
        store = links.enter_context(listening(host))
        self._store_fd = store.fileno()
        self._spread = SpreadConfig(store_address=address_of(store, host), own_host=host)
        calls = await links.enter_async_context(RankCalls(host))
        share = local_ranks(settings)
        for rank in range(share, settings.num_ranks):
            address = settings.rank_hosts[rank // share - 1]
            self.others.append(RemoteRank(f"rank{rank}", address, self._name.secret, self.leaving))
        started = [self._start_other(rank, other, calls) for rank, other in enumerate(self.others, share)]
        for rank, link in enumerate(await together(*started), share):
            self._engine_ends[rank] = link

    def make_links(self, links: AsyncExitStack) -> None:
        """What is inherited on this host."""
        for rank in range(1, local_ranks(self._settings)):
            pair = socket.socketpair()
            self._engine_ends[rank], self._rank_ends[rank] = map(links.enter_context, pair)
        if self._spread is None:
            self._store_fd = os.memfd_create("kvmesh-ranks", os.MFD_CLOEXEC)
            links.callback(os.close, self._store_fd)

    async def start_engine(self, fds: tuple[int, ...]) -> Child:
        """Rank 0."""
        ends = tuple(end.fileno() for _, end in sorted(self._engine_ends.items()))
        config = msgspec.structs.replace(self._config, ranks=self._place(0, ends, self._store_fd))
        return await _start("engine", config, (*fds, *ends, self._store_fd), FromEngineToFront)

    async def start_rank(self, rank: int) -> Child:
        """Another one on this host."""
        end = self._rank_ends[rank].fileno()
        if self._spread is None:
            inherited = (self._config.pool_fd, end, self._store_fd)
            return await _start(f"rank{rank}", self._of_rank(rank, end), inherited, FromRankToFront)
        return await _start(f"rank{rank}", self._of_rank(rank, end), (end,), FromRankToFront)

    async def _start_other(self, rank: int, other: RemoteRank, calls: RankCalls) -> socket.socket:
        settings, share = self._settings, local_ranks(self._settings)
        address = settings.rank_hosts[rank // share - 1]
        start = rank_host_pb2.StartRank(
            release=RELEASE,
            worker_id=self._name.worker_id,
            epoch=self._name.epoch,
            rank=rank,
            model=self._name.model,
            engine_config=msgspec.json.encode(self._of_rank(rank, -1)),
            steps_address=calls.address,
            token=calls.token,
            silence_s=settings.child_silence_s,
            host_ranks=share * settings.rank_hosts.count(address),
        )
        await other.start(start)
        return await calls.link(rank, _CALL_TIMEOUT_S)

    def _of_rank(self, rank: int, end: int) -> EngineConfig:
        is_spread = self._spread is not None
        pool_fd, store_fd = (-1, -1) if is_spread else (self._config.pool_fd, self._store_fd)
        place = self._place(rank, (end,), store_fd)
        return msgspec.structs.replace(self._config, mover_fd=-1, pool_fd=pool_fd, ranks=place)

    def _place(self, rank: int, link_fds: tuple[int, ...], store_fd: int) -> RankConfig:
        settings = self._settings
        return RankConfig(
            tensor=settings.tensor_parallel,
            pipeline=settings.pipeline_parallel,
            expert=settings.expert_parallel,
            rank=rank,
            link_fds=link_fds,
            store_fd=store_fd,
            load_timeout_s=settings.start_timeout_s,
            step_timeout_s=settings.rank_timeout_s,
            spread=self._spread,
        )
