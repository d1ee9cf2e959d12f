"""Learns what a step costs from steps that have run: least squares without negative costs, forgetting. Pure.

Errors are relative, so that short steps count as much as long ones. A ridge holds what the steps have not told apart
yet at what was known before. Negative costs are set to zero and the rest is solved anew (a shortened form of Lawson and
Hanson, "Solving Least Squares Problems", 1974, ch. 23).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from services.common.step_costs import StepCosts, StepWork, features, pairs_of
from services.worker.scheduler import Chunk

# Steps after which an observation counts for 1/e.
_MEMORY_STEPS = 300.0
# Observations that the prior counts as.
_PRIOR_STEPS = 3.0
# A step that takes so many times what was expected counts as one of that: the machine was busy with something else.
_MAX_RATIO = 3.0
# Sizes at which each feature matters about as much as the others, for a well-conditioned system.
_SCALES = np.array([1.0, 1.0, 256.0, 256.0 * 512.0, 16.0, 16.0 * 512.0])


class StepFit:
    """Costs of one engine's steps, of late."""

    def __init__(self, prior: StepCosts) -> None:
        self._costs = prior
        self._prior = np.array(prior.values()) * _SCALES
        typical_s = max(float(self._prior.sum()), 1e-9)
        # Each prior cost is one observation of itself, of the relative error that it has at a typical step.
        self._ridge = _PRIOR_STEPS / typical_s**2
        self._moments = np.zeros((len(_SCALES), len(_SCALES)))
        self._products = np.zeros(len(_SCALES))
        self._is_stale = False

    def observe(self, work: StepWork, step_s: float) -> None:
        """One step that has run."""
        expected_s = self.costs.seconds(work) if self._is_stale else self._costs.seconds(work)
        seconds = min(max(step_s, 1e-6), _MAX_RATIO * max(expected_s, 1e-6))
        row = np.array(features(work)) / _SCALES / seconds
        kept = np.exp(-1.0 / _MEMORY_STEPS)
        self._moments = kept * self._moments + np.outer(row, row)
        self._products = kept * self._products + row
        self._is_stale = True

    @property
    def costs(self) -> StepCosts:
        """As of the last step."""
        if self._is_stale:
            self._costs = StepCosts(*(self._solve() / _SCALES).tolist())
            self._is_stale = False
        return self._costs

    def _solve(self) -> npt.NDArray[np.float64]:
        moments = self._moments + self._ridge * np.eye(len(_SCALES))
        products = self._products + self._ridge * self._prior
        kept = np.arange(len(_SCALES))
        result = np.zeros(len(_SCALES))
        while len(kept):
            values = np.linalg.solve(moments[np.ix_(kept, kept)], products[kept])
            if (values >= 0).all():
                result[kept] = values
                break
            kept = kept[values >= 0]
        return result


def step_work(chunks: Sequence[Chunk]) -> StepWork:
    """What a step computes; a prompt's chunk of one token counts as a decoding sequence, which it is like."""
    prefills = [chunk for chunk in chunks if chunk.length > 1]
    decodes = [chunk for chunk in chunks if chunk.length == 1]
    return StepWork(
        prefill_tokens=sum(chunk.length for chunk in prefills),
        prefill_pairs=sum(pairs_of(chunk.start, chunk.length) for chunk in prefills),
        decode_sequences=len(decodes),
        context_tokens=sum(chunk.start + 1 for chunk in decodes),
    )
