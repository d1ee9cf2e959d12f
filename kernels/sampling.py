"""Drawing a token from each row of logits: the specification, in NumPy over whole sorted rows.

Weights are exp((logit - highest) / temperature) in float64. Of a row's tokens stay those whose weight is at least
- top_k: the k-th largest weight, and
- top_p: the smallest of the fewest largest weights, of those top_k left, that make up top_p of their sum, and
- min_p: min_p itself, the largest weight being 1;
so tokens tied at a threshold all stay. Tokens over 40 temperatures below the highest have no weight. The draw is the
first token, in token order, at which the sum of the weights exceeds `share` of their total. A share is a number in
[0, 1) made on the host from (seed, choice, position), which keeps a draw the same wherever and with whatever it is
made. Temperatures below 1e-5 take the highest logit, of equal ones the first. A row with a NaN, with +inf, or with
nothing but -inf gives -1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

MIN_TEMPERATURE = 1e-5
NEGLIGIBLE = 40.0


@dataclass(frozen=True)
class SamplingRows:
    """How each of R rows is drawn, tensors [R] on the logits' device.

    temperature, top_p, min_p, share: float64. top_k: int32. top_k 0, top_p 1 and min_p 0 keep all tokens.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    share: torch.Tensor


def draw_tokens(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """One token of each row of float32 logits [R, V]: int32 [R], -1 where a row's logits are not numbers."""
    values = logits.numpy()
    return torch.tensor([_draw(values[i], rows, i) for i in range(len(values))], dtype=torch.int32)


def _draw(values: npt.NDArray[np.float32], rows: SamplingRows, i: int) -> int:
    best = int(np.argmax(values))
    highest, temperature = values[best], float(rows.temperature[i])
    if not np.isfinite(highest):
        return -1
    if temperature < MIN_TEMPERATURE:
        return best
    weights = np.exp((values.astype(np.float64) - highest) / temperature)
    weights[values < highest - NEGLIGIBLE * temperature] = 0.0
    kept = np.where(weights >= _lowest(weights, rows, i), weights, 0.0)
    sums = np.cumsum(kept)
    token = int(np.searchsorted(sums, float(rows.share[i]) * sums[-1], side="right"))
    return min(token, int(np.flatnonzero(kept)[-1]))


def _lowest(weights: npt.NDArray[np.float64], rows: SamplingRows, i: int) -> float:
    """The least weight that stays."""
    lowest = float(rows.min_p[i])
    best = np.sort(weights)[::-1]
    if 0 < int(rows.top_k[i]) < len(best):
        edge = best[int(rows.top_k[i]) - 1]
        lowest = max(lowest, float(edge))
        best = best[best >= edge]
    if float(rows.top_p[i]) < 1:
        rank = int(np.searchsorted(np.cumsum(best), float(rows.top_p[i]) * best.sum()))
        lowest = max(lowest, float(best[min(rank, len(best) - 1)]))
    return lowest
