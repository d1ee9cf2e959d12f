"""Learns what each of some features costs from sums that were measured: least squares, forgetting. Pure.

Errors are relative to what was expected, so that short times count as much as long ones and noise does not pull the
mean down. A ridge holds what the observations have not told apart at what was known before. No cost is negative: those
that would be are set to zero and the rest is solved anew (a shortened form of Lawson and Hanson, "Solving Least Squares
Problems", 1974, ch. 23).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# What takes so many times what was expected, or so many times less, counts as no more than that.
_MAX_RATIO = 3.0
_LEAST = 1e-9
# Observations after which what is expected is computed anew.
_SOLVE_EVERY = 16


class RelativeFit:
    """prior: costs to begin with, and to stay with where nothing else is learned.

    scales: of each feature, the size at which it matters about as much as the others. typical: a sum of theirs. memory:
    observations after which one counts for 1/e. prior_weight: observations that the prior counts as.
    """

    def __init__(
        self,
        prior: Sequence[float],
        scales: Sequence[float],
        *,
        memory: float,
        typical: float = 1.0,
        prior_weight: float = 3.0,
    ) -> None:
        self._scales = np.array(scales, np.float64)
        self._prior = np.array(prior, np.float64) * self._scales
        self._values = self._prior
        # Each prior cost is as many observations of itself, with the relative error that it makes in a typical sum.
        ridge = prior_weight / max(typical, _LEAST) ** 2
        self._ridge_moments = ridge * np.eye(len(self._scales))
        self._ridge_products = ridge * self._prior
        self._kept = float(np.exp(-1.0 / memory))
        self._moments = np.zeros((len(self._scales), len(self._scales)))
        self._products = np.zeros(len(self._scales))
        # Observations that the values do not know of.
        self._unknown = 0

    def observe(self, features: Sequence[float], measured: float) -> None:
        """One sum that was measured."""
        scaled = np.array(features, np.float64) / self._scales
        expected = max(float(scaled @ self._values), _LEAST)
        row = scaled / expected
        target = min(max(measured / expected, 1.0 / _MAX_RATIO), _MAX_RATIO)
        self._moments = self._kept * self._moments + np.outer(row, row)
        self._products = self._kept * self._products + row * target
        self._unknown += 1
        if self._unknown >= _SOLVE_EVERY:
            self.costs()

    def costs(self) -> npt.NDArray[np.float64]:
        """Of one unit of each feature, from all that was observed."""
        if self._unknown:
            self._values = self._solve()
            self._unknown = 0
        return self.latest

    @property
    def latest(self) -> npt.NDArray[np.float64]:
        """The costs as they were last computed: a few observations may not be in them, and nothing is computed."""
        result: npt.NDArray[np.float64] = self._values / self._scales
        return result

    def _solve(self) -> npt.NDArray[np.float64]:
        moments = self._moments + self._ridge_moments
        products = self._products + self._ridge_products
        values = np.linalg.solve(moments, products)
        kept = np.flatnonzero(values >= 0)
        if len(kept) == len(values):
            return np.asarray(values, np.float64)
        result = np.zeros(len(self._scales))
        while len(kept):
            values = np.linalg.solve(moments[np.ix_(kept, kept)], products[kept])
            if (values >= 0).all():
                result[kept] = values
                break
            kept = kept[values >= 0]
        return result
