"""Draws tokens from logits, doing only what a row asks for.

Order, as in most servers: what a grammar forbids is taken out; repetition, presence and frequency penalties and bias on
the logits; temperature; then top_k, top_p (of what top_k left) and min_p, each as a threshold on the weights, so that
tokens tied at a threshold all stay. The draw is one uniform number, inverted through the cumulative weights in token
order. That number is a hash of (seed, choice, position) and rows are worked on one by one: no result depends on other
rows of the step. NumPy over the few tokens that can matter takes a tenth of what torch takes over whole rows
(`bench/engine_loop.py`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch

from services.worker.draws import DrawRow, Draws, ScoreRow
from services.worker.messages import PositionLogprob, Sampling

MIN_LOGPROB = -9999.0
# A token this far below the best, in logits over temperature, has a share under 5e-18: less than a 52-bit draw sees.
_NEGLIGIBLE = 40.0
_SORTED_CANDIDATES = 1024
_SUMMED_TOGETHER = 256
# How far below the best logit the candidates of top_k are looked for.
_FALLS = (4.0, 8.0, 16.0)
# Below this a draw is greedy; logits divided by less would overflow.
_MIN_TEMPERATURE = 1e-5
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
_DRAW = struct.Struct("<QIQ")


def draw_tokens(logits: torch.Tensor, rows: Sequence[DrawRow]) -> Draws:
    """Draw from float32 logits [len(rows), vocab_size], which are left as they are."""
    if not rows:
        return Draws([], [])
    logits = _permit(logits, rows)
    values: Floats = _adjust(logits, rows).numpy()
    # NumPy's argmax takes a sixth of torch's time; both return the first of equal maxima.
    best = np.argmax(values, axis=1)
    # A NaN or an infinity anywhere in a row is what argmax finds.
    valid: list[bool] = np.isfinite(values[np.arange(len(rows)), best]).tolist()
    tokens: list[int] = best.tolist()
    follows = True
    for i, row in enumerate(rows):
        if follows and valid[i] and row.sampling.temperature >= _MIN_TEMPERATURE:
            tokens[i] = _draw_row(values[i], row)
        follows = row.drafted is None or (follows and tokens[i] == row.drafted)
    logprobs = _logprobs(logits, tokens, rows)
    return Draws([token if ok else None for token, ok in zip(tokens, valid, strict=True)], logprobs)


def score_tokens(logits: torch.Tensor, rows: Sequence[ScoreRow]) -> list[PositionLogprob | None]:
    """Log probabilities in float32 logits [len(rows), vocab_size], which are left as they are."""
    if not rows:
        return []
    log_probs = torch.log_softmax(logits, -1)
    told = log_probs[torch.arange(len(rows)), torch.tensor([row.token for row in rows])]
    ranks: list[int] = ((log_probs > told[:, None]).sum(-1) + 1).tolist()
    best = log_probs.topk(min(max(row.num_top for row in rows), log_probs.shape[-1]))
    values = best.values.clamp(min=MIN_LOGPROB).tolist()
    result: list[PositionLogprob | None] = []
    for i, (row, value) in enumerate(zip(rows, told.tolist(), strict=True)):
        top = list(zip(best.indices[i].tolist(), values[i], strict=True))[: row.num_top]
        result.append(None if math.isnan(value) else PositionLogprob(max(value, MIN_LOGPROB), top, ranks[i]))
    return result


def uniform(seed: int, choice: int, position: int) -> float:
    """The number in [0, 1) that the draw of one token uses: 52 bits of BLAKE2b over the three."""
    digest = blake2b(_DRAW.pack(seed, choice, position), digest_size=8, person=b"kvm draw").digest()
    return float((int.from_bytes(digest, "little") >> 12) * 2.0**-52)


def _permit(logits: torch.Tensor, rows: Sequence[DrawRow]) -> torch.Tensor:
    """Minus infinity where a grammar does not allow a token; the same tensor when no row has one."""
    if all(row.allowed is None for row in rows):
        return logits
    values: Floats = logits.numpy()
    # Few tokens are allowed, mostly: picking these out takes a fifth of the time that covering the others does.
    permitted = np.full_like(values, -np.inf)
    for to, given, row in zip(permitted, values, rows, strict=True):
        kept = slice(None) if row.allowed is None else np.flatnonzero(row.allowed)
        to[kept] = given[kept]
    return torch.from_numpy(permitted)


def _adjust(logits: torch.Tensor, rows: Sequence[DrawRow]) -> torch.Tensor:
    """Penalties and bias; the same tensor when no row has any."""
    touched = [i for i, row in enumerate(rows) if _has_penalty(row.sampling) or row.sampling.logit_bias]
    if not touched:
        return logits
    adjusted = logits.clone()
    for i in touched:
        row, sampling = adjusted[i], rows[i].sampling
        if _has_penalty(sampling):
            _penalise(row, rows[i])
        if sampling.logit_bias:
            bias_ids = torch.tensor(list(sampling.logit_bias))
            row[bias_ids] += torch.tensor(list(sampling.logit_bias.values()), dtype=row.dtype)
    return adjusted


def _has_penalty(sampling: Sampling) -> bool:
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1)


def _penalise(row: torch.Tensor, draw: DrawRow) -> None:
    sampling = draw.sampling
    if sampling.repetition_penalty != 1:
        seen = torch.from_numpy(np.unique(np.concatenate((draw.prompt, draw.output))).astype(np.int64))
        values = row[seen]
        penalty = sampling.repetition_penalty
        row[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        used, counts = np.unique(draw.output, return_counts=True)
        loss = sampling.presence_penalty + sampling.frequency_penalty * counts
        row[torch.from_numpy(used.astype(np.int64))] -= torch.from_numpy(loss.astype(np.float32))


def _draw_row(values: Floats, draw: DrawRow) -> int:
    """A stochastic draw from one row of adjusted logits [V]."""
    sampling = draw.sampling
    highest = values.max()
    kept = _candidates(values, highest, sampling)
    weights = np.subtract(values if kept is None else values[kept], highest, dtype=np.float64)
    weights /= sampling.temperature
    np.exp(weights, out=weights)
    lowest = _lowest_weight(weights, sampling)
    if lowest > 0:
        stay = np.flatnonzero(weights >= lowest)
        weights, kept = weights[stay], stay if kept is None else kept[stay]
    index = _inverse_cdf(weights, uniform(sampling.seed, draw.choice, draw.position))
    return index if kept is None else int(kept[index])


def _candidates(values: Floats, highest: np.float32, sampling: Sampling) -> Indices | None:
    """Tokens that top_k leaves and whose share is not negligible; None: (nearly) all of them."""
    edge = highest - _NEGLIGIBLE * sampling.temperature
    if 0 < sampling.top_k < len(values):
        edge = max(edge, _largest(values, highest, sampling.top_k))
    found = values >= edge
    # Picking tokens out takes as long as the arithmetic on this share of them.
    return None if np.count_nonzero(found) > len(values) // 2 else np.flatnonzero(found)


def _largest(values: Floats, highest: np.float32, rank: int) -> np.float32:
    """The value of that rank, 1 being the highest. Looks close to the top first, where few have to be sorted."""
    for fall in _FALLS:
        near = values[values >= highest - fall]
        if len(near) >= rank:
            values = near
            break
    smallest: np.float32 = np.partition(values, len(values) - rank)[len(values) - rank]
    return smallest


def _lowest_weight(weights: Doubles, sampling: Sampling) -> float:
    """Smallest weight that min_p and top_p leave, the largest weight being 1."""
    if sampling.top_p < 1:
        return max(sampling.min_p, _nucleus_edge(weights, sampling.top_p))
    return sampling.min_p


def _nucleus_edge(weights: Doubles, top_p: float) -> float:
    """Smallest of the fewest largest `weights` that make up `top_p` of their sum.

    What lies so low that all of it together is outside is left out at once; then the candidates are halved around their
    mean until few are left to sort.
    """
    total = weights.sum()
    target, above = top_p * total, 0.0
    candidates = weights[weights >= (1 - top_p) * total / len(weights)]
    while len(candidates) > _SORTED_CANDIDATES:
        upper = candidates >= candidates.mean()
        if upper.all():
            break
        mass = candidates[upper].sum()
        if above + mass >= target:
            candidates = candidates[upper]
        else:
            above += mass
            candidates = candidates[~upper]
    best = np.sort(candidates)[::-1]
    rank = np.searchsorted(above + np.cumsum(best), target)
    return float(best[min(rank, len(best) - 1)])


def _inverse_cdf(weights: Doubles, share: float) -> int:
    """Index at which the cumulative weight exceeds `share` of the total; sums in two levels, a fourth of the time."""
    starts = np.arange(0, len(weights), _SUMMED_TOGETHER)
    bounds = np.cumsum(np.add.reduceat(weights, starts))
    target = share * bounds[-1]
    part = min(int(np.searchsorted(bounds, target, side="right")), len(starts) - 1)
    inside = np.cumsum(weights[starts[part] : starts[part] + _SUMMED_TOGETHER])
    if part:
        inside += bounds[part - 1]
    index = int(starts[part]) + int(np.searchsorted(inside, target, side="right"))
    if index < starts[part] + len(inside):
        return index
    # The two sums of a part may differ in the last bit.
    return int(np.flatnonzero(weights[: starts[part] + len(inside)])[-1])


def _logprobs(logits: torch.Tensor, tokens: Sequence[int], rows: Sequence[DrawRow]) -> list[PositionLogprob | None]:
    """Log probabilities for the rows that want them, of the model's own distribution over the tokens permitted."""
    result: list[PositionLogprob | None] = [None] * len(rows)
    wanted = {i: count for i, row in enumerate(rows) if (count := row.sampling.num_logprobs) is not None}
    if not wanted:
        return result
    log_probs = torch.log_softmax(logits[list(wanted)], -1)
    for row, (i, count) in zip(log_probs, wanted.items(), strict=True):
        top: list[tuple[int, float]] = []
        if count:
            allowed = rows[i].allowed
            best = row.topk(min(count, row.shape[0] if allowed is None else int(np.count_nonzero(allowed))))
            values = best.values.clamp(min=MIN_LOGPROB).tolist()
            top = list(zip(best.indices.tolist(), values, strict=True))
        result[i] = PositionLogprob(max(float(row[tokens[i]]), MIN_LOGPROB), top)
    return result
