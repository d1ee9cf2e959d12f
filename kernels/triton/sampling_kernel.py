"""Greedy and stochastic draws over whole vocabularies without sorting them; sampling.py launches.

The highest logit comes from chunks of rows side by side (a greedy row ends there). For the rest one program a row finds
the thresholds of top_k and top_p by search: each pass over the row tells how many tokens, or what mass, lie at or above
four pivots, and keeps the quarter of the interval that holds the threshold. Passes cut the interval evenly by turns in
the logits, which is quick, and in their bits, which ends on the very value after 16 such passes; a search ends early
when one token is left between the bounds. As soon as few enough tokens remain above the lower bound they are gathered,
in token order, and further passes read those alone. Searching for pivots instead of sorting is the idea of FlashInfer's
sampler (Xing et al., 2025, "Sorting-Free GPU Kernels for LLM Sampling") and of Qrita (Park et al.); those draw by
rejection or only filter, this one inverts one given uniform number and so draws what the specification draws.

**Guaranteed**: greedy tokens, and top_k's set where logits differ by over 1e-15 temperatures or not at all (closer ones
have the same weight and are told apart here); otherwise the token of the specification unless a sum of weights comes
within its rounding (about 1e-13 of the total) of top_p's or of the draw's target. A row's token depends on that row
alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling import MIN_TEMPERATURE, NEGLIGIBLE

PIVOTS = tl.constexpr(4)
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
_NEGLIGIBLE = tl.constexpr(NEGLIGIBLE)


@triton.jit
def highest_kernel(
    logits_ptr: tl.tensor,
    highest_ptr: tl.tensor,
    token_ptr: tl.tensor,
    size: tl.tensor,
    stride: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """Of one chunk of one row: the highest logit and the first token that has it; NaN where there is one."""
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits_ptr + row * stride + token, mask=token < size, other=float("-inf"))
    wrong = tl.max((values != values).to(tl.int32), 0) > 0
    highest, place = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(highest_ptr + row * chunks + chunk, tl.where(wrong, float("nan"), highest))
    tl.store(token_ptr + row * chunks + chunk, chunk * CHUNK + place)


@triton.jit
def _key(values: tl.tensor) -> tl.tensor:
    """Integers in the order of the numbers; the two zeros are one."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weight(values: tl.tensor, highest: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    return tl.exp((values.to(tl.float64) - highest.to(tl.float64)) / temperature)


@triton.jit
def _pivots(low: tl.tensor, high: tl.tensor, linear: tl.tensor) -> tl.tensor:
    """Keys that cut low..high evenly, by the logits or by their bits; the first is `low`."""
    part = tl.arange(0, PIVOTS)
    pivots = low + (high - low) * part // PIVOTS
    if linear:
        least, most = _number(low), _number(high - 1)
        between = _key(least + (most - least) * (part.to(tl.float32) / PIVOTS)).to(tl.int64)
        pivots = tl.where(part == 0, low, tl.minimum(tl.maximum(between, low), high - 1))
    return pivots


@triton.jit
def _number(key: tl.tensor) -> tl.tensor:
    """The number that has the key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _amounts(
    values_ptr: tl.tensor,
    count: tl.tensor,
    pivots: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """How many tokens have keys of at least each pivot, and their mass (0 unless BY_MASS)."""
    counts, masses = tl.zeros((PIVOTS,), tl.int32), tl.zeros((PIVOTS,), tl.float64)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        values = tl.load(values_ptr + place, mask=place < count, other=float("-inf"))
        above = (_key(values)[:, None] >= pivots[None, :]) & (place < count)[:, None]
        counts += tl.sum(above.to(tl.int32), 0)
        if BY_MASS:
            masses += tl.sum(tl.where(above, _weight(values, highest, temperature)[:, None], 0.0), 0)
    return counts, masses


@triton.jit
def _source(values_ptr: tl.tensor, gathered_ptr: tl.tensor, count: tl.tensor, gathered: tl.tensor) -> tl.tensor:
    """The gathered tokens where there are any, else the row; and how many."""
    source_ptr, length = values_ptr, count
    if gathered > 0:
        source_ptr, length = gathered_ptr, gathered
    return source_ptr, length


@triton.jit
def _search(
    values_ptr: tl.tensor,
    gathered_ptr: tl.tensor,
    token_ptr: tl.tensor,
    count: tl.tensor,
    gathered: tl.tensor,
    low: tl.tensor,
    wanted: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
) -> tl.tensor:
    """The largest key at or above which lie `wanted` tokens (BY_MASS: that share of the mass from `low` on).

    Or any key that parts the tokens in the same way. Returns it, and the number of gathered tokens (0: none yet).
    """
    # low and high never need more than 33 bits apart. Of tokens at or above `high` there are too few.
    low, high = low.to(tl.int64), _key(highest).to(tl.int64) + 1
    low_count, high_count = count, count * 0
    target = wanted
    first = True
    linear = True
    while first or ((high - low > 1) and (low_count - high_count > 1) and (BY_MASS or low_count > wanted)):
        pivots = _pivots(low, high, linear)
        linear = not linear
        source_ptr, length = _source(values_ptr, gathered_ptr, count, gathered)
        counts, masses = _amounts(source_ptr, length, pivots, highest, temperature, BY_MASS, BLOCK)
        if BY_MASS:
            if first:
                target = wanted * tl.max(masses, 0)
            enough = masses >= target
        else:
            enough = counts >= target
        # The first pivot is `low` itself, where there is enough unless fewer tokens than wanted have any weight.
        enough = enough | (tl.arange(0, PIVOTS) == 0)
        low = tl.max(tl.where(enough, pivots, low), 0)
        high = tl.min(tl.where(enough, high, pivots), 0)
        low_count = tl.min(tl.where(enough, counts, 2147483647), 0)
        high_count = tl.max(tl.where(enough, high_count, counts), 0)
        first = False
        if (gathered == 0) and (low_count <= CAPACITY):
            gathered = _gather(values_ptr, gathered_ptr, token_ptr, count, low, BLOCK)
    return low, gathered


@triton.jit
def _gather(
    values_ptr: tl.tensor,
    gathered_ptr: tl.tensor,
    token_ptr: tl.tensor,
    count: tl.tensor,
    low: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Write the tokens with keys of at least `low`, in order; their number."""
    written = count * 0
    for start in range(0, count, BLOCK):
        token = start + tl.arange(0, BLOCK)
        values = tl.load(values_ptr + token, mask=token < count, other=float("-inf"))
        keep = ((_key(values) >= low) & (token < count)).to(tl.int32)
        place = written + tl.cumsum(keep, 0) - 1
        tl.store(gathered_ptr + place, values, mask=keep > 0)
        tl.store(token_ptr + place, token, mask=keep > 0)
        written += tl.sum(keep, 0)
    tl.debug_barrier()
    return written


@triton.jit
def _kept_weights(
    values_ptr: tl.tensor,
    start: tl.tensor,
    count: tl.tensor,
    low: tl.tensor,
    min_p: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    place = start + tl.arange(0, BLOCK)
    values = tl.load(values_ptr + place, mask=place < count, other=float("-inf"))
    weights = _weight(values, highest, temperature)
    return tl.where((_key(values) >= low) & (place < count) & (weights >= min_p), weights, 0.0)


@triton.jit
def _invert(
    values_ptr: tl.tensor,
    count: tl.tensor,
    low: tl.tensor,
    min_p: tl.tensor,
    share: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Place of the first token at which the weights' sum exceeds `share` of their total."""
    total = share * 0.0
    for start in range(0, count, BLOCK):
        total += tl.sum(_kept_weights(values_ptr, start, count, low, min_p, highest, temperature, BLOCK), 0)
    target = share * total
    before, start, found = total * 0.0, count * 0, count * 0 - 1
    while (start < count) and (found < 0):
        weights = _kept_weights(values_ptr, start, count, low, min_p, highest, temperature, BLOCK)
        mass = tl.sum(weights, 0)
        if before + mass > target:
            sums = before + tl.cumsum(weights, 0)
            beyond = tl.where((sums > target) & (weights > 0), tl.arange(0, BLOCK), BLOCK)
            # The two sums may differ in the last bit: then it is the last token with a weight.
            last = tl.max(tl.where(weights > 0, tl.arange(0, BLOCK), 0), 0)
            found = start + tl.minimum(tl.min(beyond, 0), last)
        before += mass
        start += BLOCK
    return found


@triton.jit
def draw_kernel(
    logits_ptr: tl.tensor,
    highest_ptr: tl.tensor,
    best_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    share_ptr: tl.tensor,
    gathered_ptr: tl.tensor,
    token_ptr: tl.tensor,
    out_ptr: tl.tensor,
    size: tl.tensor,
    stride: tl.tensor,
    chunks: tl.tensor,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    maxima = tl.load(highest_ptr + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    wrong = tl.max(((maxima != maxima) | (maxima == float("inf"))).to(tl.int32), 0) > 0
    highest, place = tl.max(maxima, 0, return_indices=True, return_indices_tie_break_left=True)
    wrong = wrong | (highest == float("-inf"))
    temperature = tl.load(temperature_ptr + row)
    result = tl.where(wrong, -1, tl.load(best_ptr + row * chunks + place))
    if (temperature >= _MIN_TEMPERATURE) and (wrong == 0):
        values_ptr = logits_ptr + row * stride
        gathered_ptr += row * CAPACITY
        token_ptr += row * CAPACITY
        low = _key(highest - (temperature * _NEGLIGIBLE).to(tl.float32)).to(tl.int64)
        gathered = size * 0
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        if (top_k > 0) and (top_k < size):
            low, gathered = _search(
                values_ptr, gathered_ptr, token_ptr, size, gathered, low, top_k, highest, temperature,
                False, BLOCK, CAPACITY,
            )  # fmt: skip
        if top_p < 1:
            low, gathered = _search(
                values_ptr, gathered_ptr, token_ptr, size, gathered, low, top_p, highest, temperature,
                True, BLOCK, CAPACITY,
            )  # fmt: skip
        min_p, share = tl.load(min_p_ptr + row), tl.load(share_ptr + row)
        source_ptr, length = _source(values_ptr, gathered_ptr, size, gathered)
        result = _invert(source_ptr, length, low, min_p, share, highest, temperature, BLOCK)
        if gathered > 0:
            result = tl.load(token_ptr + result)
    tl.store(out_ptr + row, result)
