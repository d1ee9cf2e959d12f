"""How predictions are corrected by what they turned out to be worth. Pure.

The raw prediction is a sum of terms; each is given a weight, that of prefill by the length of what is computed and that
of the queue by how much of it there is: the part beyond a border has a weight of its own, so that more queue never
predicts less. What every request pays besides has a weight too. A worker's pace multiplies the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

# Lengths in tokens and queues in seconds between which weights are learned apart.
LENGTH_BORDERS = (64, 256, 1024)
QUEUE_BORDERS_S = (0.1, 1.0)
# What a request pays besides, in units of 10 ms.
OVERHEAD_S = 0.01
_NUM_LENGTHS, _NUM_QUEUES = len(LENGTH_BORDERS) + 1, len(QUEUE_BORDERS_S) + 1
# Overhead, queue, prefill, and what others add (interference and pulls).
NUM_WEIGHTS = 1 + _NUM_QUEUES + _NUM_LENGTHS + 1
PRIOR = (0.0, *(1.0,) * (NUM_WEIGHTS - 1))


@dataclass(frozen=True, slots=True)
class Correction:
    """weights: of the features of a time to the first token; tpot: factor of the time of each further one."""

    weights: tuple[float, ...] = PRIOR
    tpot: float = 1.0


def features(
    queue_s: FloatArray, prefill_s: FloatArray, others_s: FloatArray, tokens: npt.NDArray[np.int64]
) -> FloatArray:
    """[candidate, weight] in seconds."""
    borders = np.array([0.0, *QUEUE_BORDERS_S, np.inf])
    parts = np.clip(queue_s[:, None] - borders[:-1], 0.0, np.diff(borders))
    by_length = np.zeros((len(prefill_s), _NUM_LENGTHS))
    by_length[np.arange(len(prefill_s)), np.searchsorted(LENGTH_BORDERS, tokens)] = prefill_s
    overhead = np.full((len(prefill_s), 1), OVERHEAD_S)
    return np.concatenate([overhead, parts, by_length, others_s[:, None]], axis=1)
