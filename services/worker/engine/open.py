"""From the engine's configuration to a model that runs: its runner, its block pool, and how blocks leave and enter it.

The descriptor that the front made is the memory that engine and mover share: the pool itself on CPU, a staging area
where the pool is not shared (on CUDA, on CPU where staging_bytes asks for it, where ranks are on other hosts).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from services.worker.block_transfers import BlockTransfers, SharedTransfers
from services.worker.engine.config import EngineConfig, RankConfig
from services.worker.engine.gpu import cuda_device
from services.worker.engine.load_progress import ProgressTeller
from services.worker.engine.memory import (
    cpu_pool,
    served_context,
    share_memory,
    spread_staging_bytes,
    staging_slots,
)
from services.worker.engine_messages import LoadProgress
from services.worker.model.adapter import AdapterTable
from services.worker.model.device.block_copier import PoolCopier
from services.worker.model.device.timeline import CpuTimeline
from services.worker.model.kv_pool import KvPool
from services.worker.model.layout import KvLayout
from services.worker.model.load import load_runner
from services.worker.model.model_files import open_model
from services.worker.model.runner import RunnerSpec
from services.worker.model.step import Runner
from services.worker.parallel.block_parts import PartCopier
from services.worker.parallel.join import join_ranks
from services.worker.parallel.runner import ParallelRunner
from services.worker.parallel.step_link import StepLink
from services.worker.staging import StagedTransfers

DEFAULT_STAGING_BYTES = 2**30


class ModelRunner(Runner, Protocol):
    """A runner that says what it runs."""

    @property
    def spec(self) -> RunnerSpec:
        """Of the loaded model."""


@dataclass(frozen=True)
class OpenReplica:
    """transfer_slots: blocks that fit the memory shared with the mover."""

    runner: ModelRunner
    transfers: BlockTransfers
    transfer_slots: int
    # None: the runner takes no adapters.
    adapters: AdapterTable | None = None


def open_replica(config: EngineConfig, threads: int, tell: Callable[[LoadProgress], None]) -> OpenReplica:
    """Size and map the memory, load the model. tell: how far that is, from any thread.

    Raises ModelError, DeviceUnavailable, ConfigurationError, ValueError, OSError, or RankLost.
    """
    if config.ranks is not None:
        return _open_group(config, config.ranks, threads, tell)
    if config.device == "cuda":
        device = cuda_device()
        # Needs Triton, which machines without a GPU need not have.
        from services.worker.engine.open_cuda import open_device

        return open_device(config, device, tell)
    return _open_cpu(config, threads, tell)


def _open_group(
    config: EngineConfig, place: RankConfig, threads: int, tell: Callable[[LoadProgress], None]
) -> OpenReplica:
    joined = join_ranks(config, place, threads, tell)
    links = [StepLink(sock, place.step_timeout_s) for sock in joined.sockets]
    runner = ParallelRunner(joined.runner, joined.group, links)
    if place.spread is None:
        return OpenReplica(runner, SharedTransfers(), runner.spec.num_blocks)
    layout = runner.spec.layout
    staging = map_staging(config.pool_fd, layout, spread_staging_bytes(config, place, layout))
    copier = PartCopier(joined.runner.decoder.pool, joined.group.shard, links, staging, layout)
    return OpenReplica(runner, StagedTransfers(copier, len(staging)), len(staging))


def _open_cpu(config: EngineConfig, threads: int, tell: Callable[[LoadProgress], None]) -> OpenReplica:
    if config.weight_dtype == "float8":
        raise ValueError("weight_dtype=float8: is for device cuda")
    path = Path(config.model_path)
    files = open_model(path)
    model = files.config
    layout, num_blocks = cpu_pool(config, model)
    pool_bytes = layout.pool_bytes(num_blocks)
    staging = map_staging(config.pool_fd, layout, config.staging_bytes) if config.staging_bytes else None
    pool_buffer = share_memory(config.pool_fd, pool_bytes) if staging is None else mmap.mmap(-1, pool_bytes)
    runner = load_runner(
        path,
        dtype=config.dtype,
        weight_dtype=config.weight_dtype,
        pool_buffer=pool_buffer,
        num_threads=threads,
        served_context=served_context(config, model),
        max_step_tokens=config.step_token_budget,
        staging_bytes=0 if staging is None else staging.nbytes,
        adapter_slots=config.max_adapters,
        adapter_bytes=config.max_adapter_bytes if config.max_adapters else 0,
        progress=ProgressTeller(files.size, tell).add,
    )
    adapters = runner.decoder.adapters if config.max_adapters else None
    if staging is None:
        return OpenReplica(runner, SharedTransfers(), num_blocks, adapters)
    copier = PoolCopier(KvPool(runner.decoder.pool, layout), staging, CpuTimeline())
    return OpenReplica(runner, StagedTransfers(copier, len(staging)), len(staging), adapters)


def map_staging(descriptor: int, layout: KvLayout, num_bytes: int) -> torch.Tensor:
    """The staging area, uint8 [slots, block_bytes]. Raises ConfigurationError where no block fits."""
    slots = staging_slots(layout, num_bytes)
    shared = share_memory(descriptor, slots * layout.block_bytes)
    return torch.frombuffer(shared, dtype=torch.uint8).view(slots, layout.block_bytes)
