"""The load of one engine at a moment, as its front is told it. Pure."""

from __future__ import annotations

from services.worker.adapters.source import AdapterFigures
from services.worker.block_pool import BlockPool
from services.worker.engine_messages import EngineLoad
from services.worker.link_messages import HolderLinks
from services.worker.rates import Rates
from services.worker.scheduler import Scheduler
from services.worker.sequence import Status
from services.worker.transfers import Transfers


def engine_load(
    scheduler: Scheduler,
    pool: BlockPool,
    transfers: Transfers,
    rates: Rates,
    *,
    progress: int,
    step_tokens: int,
    holders: list[HolderLinks],
    adapters: AdapterFigures | None = None,
) -> EngineLoad:
    """What these parts have at present. progress, step_tokens, holders, adapters: as in the message."""
    requests, queue, blocks = scheduler.requests.values(), scheduler.queue, pool.statistics
    running = sum(any(s.status is Status.RUNNING for s in request.sequences) for request in requests)
    return EngineLoad(
        progress=progress,
        running_requests=running,
        waiting_requests=len(requests) - running,
        queued_prefill_tokens=queue.prefill_tokens,
        queued_prefill_pairs=queue.prefill_pairs,
        waiting_prefill_tokens=queue.waiting_tokens,
        decoding_sequences=queue.decoding_sequences,
        context_tokens=queue.context_tokens,
        step_tokens=step_tokens,
        step_costs=rates.steps.costs,
        free_blocks=blocks.available,
        cached_blocks=blocks.cached,
        referenced_blocks=blocks.referenced,
        prefill_tokens_per_s=rates.prefill_tokens_per_s,
        decode_step_s=rates.decode_step_s,
        preemptions=scheduler.preemptions,
        pushes_dropped=transfers.pushes.dropped,
        pushes_deferred=transfers.pushes.deferred,
        holders=holders,
        pulls_skipped=dict(transfers.pulls_skipped),
        pulls_cut=transfers.pulls_cut,
        held_requests=sum(request.is_held for request in requests),
        pins=len(transfers.pins),
        drafted_tokens=scheduler.speculation.drafted,
        accepted_tokens=scheduler.speculation.accepted,
        adapters=adapters,
    )
