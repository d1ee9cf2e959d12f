"""A group whose ranks are threads of the test: real gloo, real links, one interpreter."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from bench.rank_group import TIMEOUT_S, engine_config, rank_place
from services.worker.engine.config import EngineConfig
from services.worker.engine_messages import FromFrontToEngine
from services.worker.errors import RankLost
from services.worker.ipc import Link
from services.worker.messages import Message
from services.worker.model.errors import ModelError
from services.worker.model.kv_pool import KvPool
from services.worker.model.layout import ComputeDtype
from services.worker.model.shard import Parallelism
from services.worker.parallel.join import Joined, join_ranks
from services.worker.parallel.rank import RankLoop
from services.worker.parallel.runner import ParallelRunner
from services.worker.parallel.step_link import RankLink, StepLink

NUM_BLOCKS, CONTEXT = 48, 256
_JOIN_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class ThreadGroup:
    """The runner of rank 0, and the pool that all ranks write: [blocks, kv_heads, layers, 2, 16, head_dim]."""

    runner: ParallelRunner
    pool: torch.Tensor


@contextmanager
def thread_group(path: Path, parallelism: Parallelism, dtype: ComputeDtype = "float32") -> Iterator[ThreadGroup]:
    """Raises what rank 0 raises while it loads."""
    with ExitStack() as stack:
        pool, store = (os.memfd_create(name) for name in ("pool", "store"))
        for descriptor in (pool, store):
            stack.callback(os.close, descriptor)
        config = engine_config(path, dtype, NUM_BLOCKS, CONTEXT, -1, pool)
        ends = []
        for rank in range(1, parallelism.num_ranks):
            here, there = socket.socketpair()
            front, front_there = socket.socketpair()
            stack.callback(front.close)
            place = rank_place(parallelism, rank, (there.detach(),), store)
            thread = threading.Thread(target=run_rank, args=(msgspec.structs.replace(config, ranks=place), front_there))
            thread.start()
            stack.callback(thread.join, _JOIN_TIMEOUT_S)
            ends.append(here.detach())
        joined = join_ranks(config, rank_place(parallelism, 0, tuple(ends), store), 1, lambda _: None)
        stack.callback(leave, joined)
        whole = KvPool(joined.runner.decoder.pool, joined.runner.spec.layout).blocks
        links = [StepLink(sock, TIMEOUT_S) for sock in joined.sockets]
        yield ThreadGroup(ParallelRunner(joined.runner, joined.group, links), _whole(whole))


def _whole(part: torch.Tensor) -> torch.Tensor:
    """The pool of which a rank's is a view."""
    assert part._base is not None
    blocks, _, _, two, tokens, head_dim = part.shape
    block, head, layer = part.stride()[:3]
    shape = (blocks, block // head, head // layer, two, tokens, head_dim)
    return part.as_strided(shape, part.stride(), 0)


def run_rank(config: EngineConfig, front: socket.socket) -> None:
    """A rank other than 0, until its links close. What keeps it from joining rank 0 raises too."""
    place = config.ranks
    assert place is not None
    with front:
        try:
            joined = join_ranks(config, place, 1, lambda _: None)
        except (ModelError, RankLost):
            close_all(place.link_fds)
            return
        link: Link[Message] = Link(front, FromFrontToEngine)
        with suppress(RankLost, ConnectionError):
            RankLoop(joined.runner, joined.group, RankLink(joined.sockets[0], TIMEOUT_S), link).run()
        leave(joined)


def close_all(descriptors: Iterable[int]) -> None:
    """Descriptors that no socket has taken."""
    for descriptor in descriptors:
        os.close(descriptor)


def leave(joined: Joined) -> None:
    """What a rank that is a process ends with."""
    for sock in joined.sockets:
        sock.close()
    joined.runner.close()
    joined.group.close()
