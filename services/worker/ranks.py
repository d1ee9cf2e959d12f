"""The engines of a replica: the one that the front talks to, and the other ranks where a group computes together.

They start at the same time and are ready together; the first that fails says why. All are children of the front and
end with it. What they talk over is made here and inherited: a socket from the engine to each rank, and an empty file in
which the ranks find each other.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from services.worker.children import Child, start_child
from services.worker.config import WorkerSettings
from services.worker.engine.config import EngineConfig, RankConfig
from services.worker.engine_messages import FromEngineToFront, FromRankToFront
from services.worker.errors import RankLost, StartFailed

_MODULE = "services.worker.engine"
_CAUSE_TIMEOUT_S = 2.0


async def start_engines(
    settings: WorkerSettings, config: EngineConfig, fds: tuple[int, ...], stack: AsyncExitStack
) -> tuple[Child, tuple[Child, ...]]:
    """The engine (rank 0) and the other ranks in their order, which `stack` ends.

    config: of an engine that is alone, but for its front_fd. fds: further descriptors that it inherits.
    """
    children: list[Child] = []
    stack.push_async_callback(_end_all, children)
    if settings.num_ranks == 1:
        children.append(await _start("engine", config, fds, FromEngineToFront))
        return children[0], ()
    with _Links(settings.num_ranks - 1) as links:
        config = msgspec.structs.replace(config, threads=rank_threads(settings))
        of_engine = msgspec.structs.replace(config, ranks=_place(settings, 0, links.engine_ends, links))
        inherited = (*fds, *links.engine_ends, links.store_fd)
        children.append(await _start("engine", of_engine, inherited, FromEngineToFront))
        for rank, end in enumerate(links.rank_ends, 1):
            of_rank = msgspec.structs.replace(config, mover_fd=-1, ranks=_place(settings, rank, (end,), links))
            inherited = (config.pool_fd, end, links.store_fd)
            children.append(await _start(f"rank{rank}", of_rank, inherited, FromRankToFront))
    return children[0], tuple(children[1:])


def rank_threads(settings: WorkerSettings) -> int:
    """Compute threads of each process."""
    return max(1, (settings.threads or os.cpu_count() or 1) // settings.num_ranks)


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


def _place(settings: WorkerSettings, rank: int, link_fds: tuple[int, ...], links: _Links) -> RankConfig:
    return RankConfig(
        tensor=settings.tensor_parallel,
        pipeline=settings.pipeline_parallel,
        expert=settings.expert_parallel,
        rank=rank,
        link_fds=link_fds,
        store_fd=links.store_fd,
        load_timeout_s=settings.start_timeout_s,
        step_timeout_s=settings.rank_timeout_s,
    )


async def _end_all(children: list[Child]) -> None:
    await asyncio.gather(*(child.end() for child in children))


class _Links:
    """What a group inherits. This process's copies are closed when all have theirs: a peer's end then shows."""

    def __init__(self, count: int) -> None:
        self._pairs = [socket.socketpair() for _ in range(count)]
        self.store_fd = os.memfd_create("kvmesh-ranks", os.MFD_CLOEXEC)

    @property
    def engine_ends(self) -> tuple[int, ...]:
        return tuple(engine.fileno() for engine, _ in self._pairs)

    @property
    def rank_ends(self) -> tuple[int, ...]:
        return tuple(rank.fileno() for _, rank in self._pairs)

    def __enter__(self) -> _Links:
        return self

    def __exit__(self, *_: object) -> None:
        for pair in self._pairs:
            for end in pair:
                end.close()
        os.close(self.store_fd)
