"""By which factor first tokens come later than predicted, for most requests. Pure."""

from __future__ import annotations

from dataclasses import dataclass

# Of the ratios of actual to predicted: the share that the factor is to cover, and how far one sample moves it.
_QUANTILE = 0.9
_STEP = 0.05
_MOST = 2.0
# Below this the fixed costs of a request, which no queue explains, decide the ratio.
_LEAST_PREDICTED_S = 0.1


@dataclass(slots=True)
class Lateness:
    """A running quantile, moved up by late answers and down by others (Robbins and Monro, 1951); within [1, 2]."""

    factor: float = 1.0

    def update(self, predicted_s: float, actual_s: float) -> None:
        """Take one answer in."""
        if predicted_s < _LEAST_PREDICTED_S or actual_s <= 0:
            return
        late = actual_s > self.factor * predicted_s
        moved = self.factor + _STEP * (_QUANTILE if late else _QUANTILE - 1.0)
        self.factor = min(_MOST, max(1.0, moved))
