"""Learns what a step costs from steps that have run. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from services.common.relative_fit import RelativeFit
from services.common.step_costs import StepCosts, StepWork, features, pairs_of
from services.worker.chunk import Chunk

# Steps after which an observation counts for 1/e.
_MEMORY_STEPS = 300.0
# Sizes at which each feature matters about as much as the others.
_SCALES = (1.0, 1.0, 256.0, 256.0 * 512.0, 16.0, 16.0 * 512.0)


class StepFit:
    """Costs of one engine's steps, of late."""

    def __init__(self, prior: StepCosts) -> None:
        typical_s = sum(value * scale for value, scale in zip(prior.values(), _SCALES, strict=True))
        self._fit = RelativeFit(prior.values(), _SCALES, memory=_MEMORY_STEPS, typical=typical_s)

    def observe(self, work: StepWork, step_s: float) -> None:
        """One step that has run."""
        self._fit.observe(features(work), step_s)

    @property
    def latest_costs(self) -> StepCosts:
        """As of one of the last steps, for who asks at each step."""
        return StepCosts(*self._fit.latest.tolist())

    @property
    def costs(self) -> StepCosts:
        """As of the last step."""
        return StepCosts(*self._fit.costs().tolist())


def step_work(chunks: Sequence[Chunk]) -> StepWork:
    """What a step computes; a prompt's chunk of one token counts as a decoding sequence, which it is like.

    So does each guess of a draft.
    """
    prefills = [chunk for chunk in chunks if chunk.length > 1 + chunk.drafted]
    decodes = [chunk for chunk in chunks if chunk.length == 1 + chunk.drafted]
    return StepWork(
        prefill_tokens=sum(chunk.length for chunk in prefills),
        prefill_pairs=sum(pairs_of(chunk.start, chunk.length) for chunk in prefills),
        decode_sequences=sum(chunk.length for chunk in decodes),
        context_tokens=sum(chunk.start + 1 + row for chunk in decodes for row in range(chunk.length)),
    )
