"""Draws tokens from logits: torch, vectorised over the rows of a step, doing only what some row asks for.

Order, as in most servers: repetition, presence and frequency penalties and bias on the logits; temperature; then top_k,
top_p (of what top_k left) and min_p, each as a threshold on the logits, so that tokens tied at a threshold all stay.
The draw is one uniform number, inverted through the cumulative probabilities in token order. That number is a hash of
(seed, choice, position) and every operation here works row by row: no result depends on other rows of the step.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch

from services.worker.draws import DrawRow, Draws
from services.worker.messages import PositionLogprob, Sampling

MIN_LOGPROB = -9999.0
# Best logits of a row that nearly always settle top_k and top_p; selecting them takes a twelfth of sorting the row.
_CANDIDATES = 256
# Bins of a row's logits by their distance from the highest; what is farther away weighs nothing in double precision.
_NUM_BINS = 2048
_BINNED_RANGE = 40.0
# Below this a draw is greedy; logits divided by less would overflow.
_MIN_TEMPERATURE = 1e-5
_DRAW = struct.Struct("<QIQ")


def draw_tokens(logits: torch.Tensor, rows: Sequence[DrawRow]) -> Draws:
    """Draw from float32 logits [len(rows), vocab_size], which are left as they are."""
    if not rows:
        return Draws([], [])
    adjusted = _adjust(logits, rows)
    # NumPy's argmax takes a sixth of torch's time; both return the first of equal maxima.
    tokens: list[int] = np.argmax(adjusted.numpy(), axis=1).tolist()
    # A NaN or an infinity anywhere in a row is what argmax finds.
    valid = torch.isfinite(adjusted[torch.arange(len(rows)), torch.tensor(tokens)]).tolist()
    stochastic = [i for i, row in enumerate(rows) if valid[i] and row.sampling.temperature >= _MIN_TEMPERATURE]
    if stochastic:
        picked = adjusted if len(stochastic) == len(rows) else adjusted[stochastic]
        for i, token in zip(stochastic, _draw(picked, [rows[i] for i in stochastic]), strict=True):
            tokens[i] = token
    logprobs = _logprobs(logits, tokens, rows)
    return Draws([token if ok else None for token, ok in zip(tokens, valid, strict=True)], logprobs)


def uniform(seed: int, choice: int, position: int) -> float:
    """The number in [0, 1) that the draw of one token uses: 52 bits of BLAKE2b over the three."""
    digest = blake2b(_DRAW.pack(seed, choice, position), digest_size=8, person=b"kvm draw").digest()
    return float((int.from_bytes(digest, "little") >> 12) * 2.0**-52)


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


def _draw(logits: torch.Tensor, rows: Sequence[DrawRow]) -> list[int]:
    """Stochastic draws from adjusted logits [len(rows), V]."""
    temperature = torch.tensor([row.sampling.temperature for row in rows]).unsqueeze(1)
    scaled = logits / temperature
    thresholds = _thresholds(scaled, rows)
    if thresholds is not None:
        scaled = scaled.masked_fill(scaled < thresholds, -math.inf)
    cumulative = torch.softmax(scaled, -1).cumsum(-1, dtype=torch.float64)
    uniforms = torch.tensor([uniform(r.sampling.seed, r.choice, r.position) for r in rows], dtype=torch.float64)
    # 52-bit uniforms keep the product below the total, so that a token of positive probability is found.
    targets = uniforms.unsqueeze(1) * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    return [int(token) for token in found.clamp_(max=logits.shape[1] - 1).tolist()]


def _thresholds(scaled: torch.Tensor, rows: Sequence[DrawRow]) -> torch.Tensor | None:
    """Lowest scaled logit that stays, [len(rows), 1]; None when no row filters."""
    samplings = [row.sampling for row in rows]
    filtered = [i for i, s in enumerate(samplings) if s.top_k or s.top_p < 1]
    if not filtered and not any(s.min_p for s in samplings):
        return None
    lowest = torch.full((len(rows),), -math.inf)
    if any(s.min_p for s in samplings):
        log_min_p = torch.tensor([math.log(s.min_p) if s.min_p else -math.inf for s in samplings])
        lowest = torch.maximum(lowest, scaled.amax(1) + log_min_p)
    if filtered:
        picked = scaled if len(filtered) == len(rows) else scaled[filtered]
        kept = _top_thresholds(picked, [samplings[i] for i in filtered])
        lowest[filtered] = torch.maximum(lowest[filtered], kept)
    return lowest.unsqueeze(1)


def _top_thresholds(scaled: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Thresholds of top_k and top_p, [rows]; rows that the best few do not settle are looked at whole."""
    count = min(_CANDIDATES, scaled.shape[1])
    result, settled = _cut(scaled.topk(count).values, scaled, samplings)
    for i, ok in enumerate(settled):
        if not ok:
            result[i] = _whole_row_threshold(scaled[i].numpy(), samplings[i])
    return result


def _whole_row_threshold(values: npt.NDArray[np.float32], sampling: Sampling) -> float:
    """Threshold of one row in linear time: weights are gathered by logit, and only the bin that decides is sorted."""
    vocab = len(values)
    highest = values.max()
    if 0 < sampling.top_k < vocab:
        lowest = np.partition(values, vocab - sampling.top_k)[vocab - sampling.top_k]
        values = values[values >= lowest]
    if sampling.top_p >= 1:
        return float(values.min())
    below = highest - values
    weights = np.exp(-below, dtype=np.float64)
    bins = np.minimum(below * (_NUM_BINS / _BINNED_RANGE), _NUM_BINS - 1).astype(np.int32)
    cumulative = np.cumsum(np.bincount(bins, weights=weights, minlength=_NUM_BINS))
    target = sampling.top_p * cumulative[-1]
    decisive = int(np.searchsorted(cumulative, target))
    before = cumulative[decisive - 1] if decisive else 0.0
    inside = np.sort(values[bins == decisive])[::-1]
    reached = before + np.cumsum(np.exp(inside - highest, dtype=np.float64)) >= target
    # Rounding may leave the bin's own sum a little short; then it ends with the bin.
    return float(inside[reached.argmax() if reached.any() else -1])


def _cut(best: torch.Tensor, scaled: torch.Tensor, samplings: Sequence[Sampling]) -> tuple[torch.Tensor, list[bool]]:
    """Thresholds among the `best` logits of each row, descending, and whether they were found there."""
    rows, count = best.shape
    vocab = scaled.shape[1]
    top_k = torch.tensor([min(s.top_k, vocab) if s.top_k else vocab for s in samplings])
    ranks = torch.arange(count)
    inside = ranks < top_k.unsqueeze(1)
    # top_p is a share of what top_k leaves; without top_k, of everything.
    weights = torch.exp((best - best[:, :1]).double()) * inside
    # Row by row, unlike logsumexp, whose sum takes another path for a single row.
    everything = torch.exp(-torch.log_softmax(scaled, 1).amax(1).double())
    cumulative = weights.cumsum(1)
    total = torch.where(top_k <= count, cumulative[:, -1], everything)
    top_p = torch.tensor([float(s.top_p) for s in samplings], dtype=torch.float64)
    reached = cumulative >= (top_p * total).unsqueeze(1)
    last = torch.where(reached.any(1) & (top_p < 1), reached.int().argmax(1), torch.full((rows,), vocab - 1))
    last = torch.minimum(last, top_k - 1)
    settled = (last < count) & ((top_k <= count) | (top_k == vocab))
    return best.gather(1, last.clamp(max=count - 1).unsqueeze(1)).squeeze(1), settled.tolist()


def _logprobs(logits: torch.Tensor, tokens: Sequence[int], rows: Sequence[DrawRow]) -> list[PositionLogprob | None]:
    """Log probabilities of the model's own distribution for the rows that want them."""
    result: list[PositionLogprob | None] = [None] * len(rows)
    wanted = {i: count for i, row in enumerate(rows) if (count := row.sampling.num_logprobs) is not None}
    if not wanted:
        return result
    log_probs = torch.log_softmax(logits[list(wanted)], -1)
    for row, (i, count) in zip(log_probs, wanted.items(), strict=True):
        top: list[tuple[int, float]] = []
        if count:
            best = row.topk(min(count, row.shape[0]))
            values = best.values.clamp(min=MIN_LOGPROB).tolist()
            top = list(zip(best.indices.tolist(), values, strict=True))
        result[i] = PositionLogprob(max(float(row[tokens[i]]), MIN_LOGPROB), top)
    return result
