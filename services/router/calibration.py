"""Compares what decisions predicted with what happened, and learns from it. Pure; time comes in as an argument."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from services.common.relative_fit import RelativeFit
from services.router.domain import Prediction
from services.router.policies.correction import NUM_WEIGHTS, OVERHEAD_S, PRIOR, Correction

# Requests after which one counts for 1/e, and those that the uncorrected prediction counts as.
_MEMORY = 200.0
_PRIOR_WEIGHT = 2.0
_MOST_WEIGHT, _LEAST_WEIGHT, _MOST_OVERHEAD_S = 3.0, 1 / 3, 0.1
_TPOT_WEIGHT, _MOST_TPOT = 0.05, math.log(3.0)
_PACE_WEIGHT, _MOST_PACE, _PACE_HALF_LIFE_S = 0.02, math.log(2.0), 60.0
# A worker's pace that differs by less is chance, and must not send everybody to one of many equal workers.
_PACE_CHANCE = 0.1


@dataclass(slots=True)
class Pace:
    """How much slower than predicted one worker is; forgets."""

    log_ratio: float = 0.0
    at_s: float = 0.0

    def observe(self, log_ratio: float, now_s: float) -> float:
        """One request took exp(log_ratio) times what it should have; the worker's factor from now on."""
        self.log_ratio *= 0.5 ** (max(0.0, now_s - self.at_s) / _PACE_HALF_LIFE_S)
        self.log_ratio += _PACE_WEIGHT * (_clip(log_ratio, _MOST_PACE) - self.log_ratio)
        self.at_s = now_s
        beyond = max(0.0, abs(self.log_ratio) - _PACE_CHANCE)
        return math.exp(math.copysign(beyond, self.log_ratio))


@dataclass(slots=True)
class Calibration:
    """What the requests of one model have taught."""

    correction: Correction = field(default_factory=Correction)
    _tpot: float = 0.0
    _fit: RelativeFit = field(
        default_factory=lambda: RelativeFit(PRIOR, (1.0,) * NUM_WEIGHTS, memory=_MEMORY, prior_weight=_PRIOR_WEIGHT)
    )

    def observe(self, prediction: Prediction, *, ttft_s: float, tpot_s: float) -> float:
        """One request has ended; 0 for a time that it did not have. The log of its TTFT over what was expected."""
        log_ratio = 0.0
        if ttft_s > 0:
            expected_s = float(np.dot(prediction.features, self.correction.weights))
            log_ratio = math.log(ttft_s / max(expected_s, 1e-6))
            self._fit.observe(prediction.features, ttft_s / prediction.pace)
        if tpot_s > 0 and prediction.uncorrected_tpot_s > 0:
            ratio = math.log(tpot_s / prediction.uncorrected_tpot_s)
            self._tpot += _TPOT_WEIGHT * (_clip(ratio, _MOST_TPOT) - self._tpot)
        self.correction = Correction(self._weights(), math.exp(self._tpot))
        return log_ratio

    def _weights(self) -> tuple[float, ...]:
        overhead, *others = self._fit.costs().tolist()
        kept = (min(max(weight, _LEAST_WEIGHT), _MOST_WEIGHT) for weight in others)
        return (min(overhead, _MOST_OVERHEAD_S / OVERHEAD_S), *kept)


def _clip(value: float, most: float) -> float:
    return min(max(value, -most), most)
