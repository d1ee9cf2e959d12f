"""A model over a group of ranks, without the rest of a worker: rank 0 in this process, the others as engines do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from services.worker.engine.config import EngineConfig, RankConfig
from services.worker.model.layout import ComputeDtype
from services.worker.model.shard import Parallelism
from services.worker.parallel.join import join_ranks
from services.worker.parallel.runner import ParallelRunner
from services.worker.parallel.step_link import StepLink

TIMEOUT_S = 120.0
_END_TIMEOUT_S = 30.0


@contextmanager
def open_group(
    path: Path, parallelism: Parallelism, *, dtype: ComputeDtype, num_blocks: int, context: int
) -> Iterator[ParallelRunner]:
    """One thread a rank. Raises what a rank raises while it loads."""
    with ExitStack() as stack:
        pool, store = (os.memfd_create(name) for name in ("pool", "store"))
        for descriptor in (pool, store):
            stack.callback(os.close, descriptor)
        links = []
        for rank in range(1, parallelism.num_ranks):
            here, there = socket.socketpair()
            front, front_there = socket.socketpair()
            stack.callback(front.close)
            config = engine_config(path, dtype, num_blocks, context, front_there.fileno(), pool)
            config = msgspec.structs.replace(config, ranks=rank_place(parallelism, rank, (there.fileno(),), store))
            stack.callback(_end, _start(config, (there.fileno(), front_there.fileno(), pool, store)))
            there.close()
            front_there.close()
            links.append(here.detach())
        config = engine_config(path, dtype, num_blocks, context, -1, pool)
        joined = join_ranks(config, rank_place(parallelism, 0, tuple(links), store), 1, lambda _: None)
        for sock in joined.sockets:
            stack.callback(sock.close)
        stack.callback(joined.group.close)
        stack.callback(joined.runner.close)
        steps = [StepLink(sock, TIMEOUT_S) for sock in joined.sockets]
        yield ParallelRunner(joined.runner, joined.group, steps)


def _start(config: EngineConfig, descriptors: tuple[int, ...]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "services.worker.engine", "--config", msgspec.json.encode(config).decode()]
    return subprocess.Popen(command, pass_fds=descriptors, stdin=subprocess.DEVNULL)


def _end(process: subprocess.Popen[bytes]) -> None:
    """It ends by itself when its links close."""
    try:
        process.wait(_END_TIMEOUT_S)
    finally:
        process.kill()
        process.wait()


def rank_place(parallelism: Parallelism, rank: int, links: tuple[int, ...], store: int) -> RankConfig:
    """As a front tells it; descriptors by number."""
    return RankConfig(
        tensor=parallelism.tensor,
        pipeline=parallelism.pipeline,
        expert=parallelism.expert,
        rank=rank,
        link_fds=links,
        store_fd=store,
        load_timeout_s=TIMEOUT_S,
        step_timeout_s=TIMEOUT_S,
    )


def engine_config(
    path: Path, dtype: ComputeDtype, num_blocks: int, context: int, front_fd: int, pool_fd: int
) -> EngineConfig:
    """What a front would tell an engine."""
    return EngineConfig(
        parent_pid=os.getpid(),
        instance="ranks",
        log_level="WARNING",
        front_fd=front_fd,
        mover_fd=-1,
        pool_fd=pool_fd,
        model_path=str(path),
        dtype=dtype,
        weight_dtype="dtype",
        threads=1,
        device="cpu",
        exact="auto",
        kv_dtype="auto",
        kv_cache_bytes=0,
        kv_cache_fraction=0.9,
        staging_bytes=0,
        num_blocks=num_blocks,
        max_context=context,
        max_adapters=0,
        max_adapter_rank=64,
        max_adapter_bytes=2**30,
        max_adapter_waiting=0,
        adapter_wait_s=1.0,
        step_token_budget=512,
        target_step_s=0.2,
        max_running=32,
        speculation_tokens=0,
        speculation_rows=0,
        pooling="none",
        max_queue_s=0.2,
        prefix_cache=True,
        max_pull_s=5.0,
        pull_half_life_s=30.0,
        push_policy="write_through",
        max_push_blocks=256,
        repush_bytes_per_s=1.0,
        max_served_blocks=1024,
    )
