"""The memory of an engine on CPU: how many blocks its pool has, and the file that it shares with mover and ranks."""

from __future__ import annotations

import mmap
import os

from services.common.settings import ConfigurationError
from services.worker.engine.config import EngineConfig, RankConfig
from services.worker.model.config import ModelConfig
from services.worker.model.layout import KvLayout
from services.worker.model.load import kv_layout

DEFAULT_POOL_BYTES = 2**30
# Less than on cuda, since a step waits until the parts of blocks that are under way between hosts have come.
DEFAULT_SPREAD_STAGING_BYTES = 2**27


def served_context(config: EngineConfig, model: ModelConfig) -> int:
    """Tokens of the longest context."""
    return min(config.max_context or model.max_positions, model.max_positions)


def cpu_pool(config: EngineConfig, model: ModelConfig) -> tuple[KvLayout, int]:
    """Its layout and number of blocks. Raises ConfigurationError where none fits."""
    layout = kv_layout(model, config.dtype)
    num_blocks = config.num_blocks or layout.num_blocks(config.kv_cache_bytes or DEFAULT_POOL_BYTES)
    if num_blocks < 1:
        raise ConfigurationError(f"kv_cache_bytes={config.kv_cache_bytes}: a block takes {layout.block_bytes}")
    return layout, num_blocks


def spread_staging_bytes(config: EngineConfig, place: RankConfig, layout: KvLayout) -> int:
    """Of the staging area that this process has of a spread group: whole blocks on rank 0, nothing on others.

    Raises ConfigurationError where no block fits.
    """
    if place.spread is None or place.rank:
        return 0
    asked = config.staging_bytes or DEFAULT_SPREAD_STAGING_BYTES
    return staging_slots(layout, asked) * layout.block_bytes


def staging_slots(layout: KvLayout, num_bytes: int) -> int:
    """Blocks that a staging area of this size holds. Raises ConfigurationError where none fits."""
    slots = num_bytes // layout.block_bytes
    if slots < 1:
        raise ConfigurationError(f"staging_bytes={num_bytes}: a block takes {layout.block_bytes}")
    return slots


def share_memory(descriptor: int, num_bytes: int) -> mmap.mmap:
    """Size the file that others have too, and map it."""
    os.ftruncate(descriptor, num_bytes)
    return mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED)
