"""From an engine's configuration to its place in a group: join, map the pool, load its part of the model."""

from __future__ import annotations

import mmap
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.worker.engine.config import EngineConfig, RankConfig
from services.worker.engine.load_progress import ProgressTeller
from services.worker.engine.memory import cpu_pool, served_context, share_memory, spread_staging_bytes
from services.worker.engine_messages import LoadProgress
from services.worker.model.load import load_runner, pool_layout
from services.worker.model.model_files import open_model
from services.worker.model.rank_loading import bytes_to_read
from services.worker.model.runner import CpuRunner
from services.worker.model.shard import Parallelism, Shard
from services.worker.parallel.group import Group
from services.worker.parallel.meeting import meeting


@dataclass(frozen=True)
class Joined:
    """runner: of this rank's part. sockets: on rank 0 to the others in their order, on these to rank 0."""

    runner: CpuRunner
    group: Group
    sockets: tuple[socket.socket, ...]


def join_ranks(config: EngineConfig, place: RankConfig, threads: int, tell: Callable[[LoadProgress], None]) -> Joined:
    """tell: how far the load is. Raises ModelError before anything is joined where the model does not divide so;
    ConfigurationError, ValueError, OSError, or RankLost.
    """
    if config.weight_dtype == "float8":
        raise ValueError("weight_dtype=float8: is for device cuda")
    path = Path(config.model_path)
    files = open_model(path)
    shard = Shard(files.config, Parallelism(place.tensor, place.pipeline, place.expert), place.rank)
    is_spread = place.spread is not None
    layout, num_blocks = cpu_pool(config, files.config)
    group = Group(
        shard,
        meeting(place, shard.parallelism.num_ranks),
        load_timeout_s=place.load_timeout_s,
        step_timeout_s=place.step_timeout_s,
        is_spread=is_spread,
    )
    pool_bytes = pool_layout(layout, group).pool_bytes(num_blocks)
    runner = load_runner(
        path,
        dtype=config.dtype,
        weight_dtype=config.weight_dtype,
        pool_buffer=mmap.mmap(-1, pool_bytes) if is_spread else share_memory(config.pool_fd, pool_bytes),
        num_threads=threads,
        served_context=served_context(config, files.config),
        max_step_tokens=config.step_token_budget,
        staging_bytes=spread_staging_bytes(config, place, layout),
        progress=ProgressTeller(bytes_to_read(files, shard, is_spread=is_spread), tell).add,
        ranks=group,
    )
    sockets = tuple(socket.socket(fileno=descriptor) for descriptor in place.link_fds)
    group.meet()
    return Joined(runner, group, sockets)
