"""From what the front tells an engine, and the size of what it has opened, to the bounds of its core."""

from __future__ import annotations

from services.common.blocks import BLOCK_TOKENS
from services.worker.admission import SchedulerLimits
from services.worker.chunk import MOST_ROWS_READ
from services.worker.core import CoreLimits
from services.worker.engine.config import EngineConfig
from services.worker.transfers import TransferLimits


def core_limits(
    config: EngineConfig, *, max_context: int, vocab_size: int, num_blocks: int, block_bytes: int
) -> CoreLimits:
    """max_context: tokens that the model is served with; block_bytes: of one block of the pool's num_blocks."""
    scheduler = SchedulerLimits(
        # What the pool cannot hold is not offered: a request that leaves max_tokens out gets all of the context.
        max_context=min(max_context, num_blocks * BLOCK_TOKENS),
        vocab_size=vocab_size,
        max_running=config.max_running,
        max_queue_s=config.max_queue_s,
        prefix_cache=config.prefix_cache,
        speculation_tokens=config.speculation_tokens,
        speculation_rows=config.speculation_rows,
        pooling=config.pooling,
    )
    transfers = TransferLimits(
        max_pull_s=config.max_pull_s,
        max_push_blocks=config.max_push_blocks,
        max_served_blocks=config.max_served_blocks,
        repush_blocks_per_s=config.repush_bytes_per_s / block_bytes,
        push_policy=config.push_policy,
    )
    return CoreLimits(scheduler, transfers, config.step_token_budget, config.target_step_s)


def most_logit_rows(config: EngineConfig) -> int:
    """Of one step: its draws, and prompt tokens that are read; a step that drafts reads none."""
    with_drafts = config.speculation_rows if config.speculation_tokens else 0
    return max(config.max_running + MOST_ROWS_READ, with_drafts)
