"""Whose a step's time was: shared out among its chunks by what each is predicted to cost. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from services.common.step_costs import StepCosts, pairs_of
from services.worker.chunk import Chunk


def charge_step(chunks: Sequence[Chunk], costs: StepCosts, step_s: float) -> None:
    """Add to each request its part of a step of `step_s` seconds; the parts together are the whole of it.

    What a step costs whoever is in it goes with the rest. Where nothing is known of costs, tokens count alike.
    """
    weights = [_cost_s(chunk, costs) for chunk in chunks]
    total = sum(weights)
    if total <= 0:
        weights = [float(chunk.length) for chunk in chunks]
        total = sum(weights)
    for chunk, weight in zip(chunks, weights, strict=True):
        chunk.sequence.request.accelerator_s += step_s * weight / total


def _cost_s(chunk: Chunk, costs: StepCosts) -> float:
    """What the chunk adds to a step, as in step_fit.step_work."""
    if chunk.length == 1 + chunk.drafted:
        context_tokens = chunk.length * chunk.start + chunk.length * (chunk.length + 1) / 2
        return costs.decode_sequence_s * chunk.length + costs.context_token_s * context_tokens
    return costs.prefill_token_s * chunk.length + costs.prefill_pair_s * pairs_of(chunk.start, chunk.length)
