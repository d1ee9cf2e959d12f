"""How predictions are corrected by what they turned out to be worth. Pure.

The raw prediction is a sum of terms; each is given a weight, that of prefill by the length of what is computed and that
of the queue by how much of it there is: the part beyond a border has a weight of its own, so that more queue never
predicts less. What every request pays besides has a weight too. A worker's pace multiplies the whole.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# Lengths in tokens and queues in seconds between which weights are learned apart.
LENGTH_BORDERS = (64, 256, 1024)
QUEUE_BORDERS_S = (0.1, 1.0)
# What a request pays besides, in units of 10 ms.
OVERHEAD_S = 0.01
_NUM_LENGTHS, _NUM_QUEUES = len(LENGTH_BORDERS) + 1, len(QUEUE_BORDERS_S) + 1
# Overhead, queue, prefill, and what others add (interference and pulls).
NUM_WEIGHTS = 1 + _NUM_QUEUES + _NUM_LENGTHS + 1
# Where each part of a queue begins, and how long it can be.
_QUEUE_PARTS = tuple((begin, end - begin) for begin, end in pairwise((0.0, *QUEUE_BORDERS_S, math.inf)))
PRIOR = (0.0, *(1.0,) * (NUM_WEIGHTS - 1))


@dataclass(frozen=True, slots=True)
class Correction:
    """weights: of the features of a time to the first token; tpot: factor of the time of each further one."""

    weights: tuple[float, ...] = PRIOR
    tpot: float = 1.0


def features(queue_s: float, prefill_s: float, others_s: float, tokens: int) -> tuple[float, ...]:
    """What the weights are of, in seconds, for one candidate."""
    by_length = [0.0] * _NUM_LENGTHS
    by_length[bisect_left(LENGTH_BORDERS, tokens)] = prefill_s
    parts = (min(max(queue_s - border_s, 0.0), width_s) for border_s, width_s in _QUEUE_PARTS)
    return (OVERHEAD_S, *parts, *by_length, others_s)


def corrected_s(
    correction: Correction, queue_s: FloatArray, prefill_s: FloatArray, others_s: FloatArray, tokens: IntArray
) -> FloatArray:
    """The features times their weights, for each candidate."""
    overhead, *weights, others = correction.weights
    by_queue, by_length = weights[:_NUM_QUEUES], weights[_NUM_QUEUES:]
    shortest, longest = (bisect_left(LENGTH_BORDERS, tokens[at]) for at in (tokens.argmin(), tokens.argmax()))
    if shortest == longest:
        total = prefill_s * by_length[shortest]
    else:
        total = prefill_s * np.array(by_length)[np.searchsorted(LENGTH_BORDERS, tokens)]
    longest_queue_s = queue_s[queue_s.argmax()]
    for weight, (border_s, width_s) in zip(by_queue, _QUEUE_PARTS, strict=True):
        if longest_queue_s > border_s:
            part_s = np.maximum(queue_s - border_s, 0.0) if border_s else queue_s
            total += weight * (np.minimum(part_s, width_s) if longest_queue_s - border_s > width_s else part_s)
    total += others * others_s
    total += overhead * OVERHEAD_S
    result: FloatArray = total
    return result
