"""Whether a prompt is better computed by one worker and answered by another: the pair, and what it costs. Pure.

    one worker:  TTFT + harm + stall                  stall: what its running streams wait for this prompt's tokens
    a pair:      TTFT + delay + eviction + stall of the first, decode harm of the second, and the handoff

all in seconds, the client's and others'. The handoff is what its pull takes longer than the prefill beside which it
runs, or its last part alone; the step that computes the last, partial block; and whatever the second is busy with when
the first is done. So a short prompt, a slow link or idle workers speak for one worker (DistServe, Zhong et al., OSDI
2024; Splitwise, Patel et al., ISCA 2024; Mooncake, Qin et al., FAST 2025).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from services.common.step_costs import pairs_of
from services.router.domain import Placement
from services.router.holders import Source, pull_run
from services.router.policies.costs import Costs
from services.router.policies.view import FloatArray, IntArray, LinkArrays, PolicyRequest, PolicyView
from services.router.roll_call import BoolArray

# What a second attempt, its grant and its messages cost beside the work.
_OVERHEAD_S = 0.02
# Each side's best by what the other does not change; of these all pairs are looked at.
MAX_PREFILL, MAX_DECODE = 4, 8
# The holder of a pull waits for a next block at least this long, and twice its own forecast on top.
_LEAST_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Side:
    """Candidates for one part of a request: their numbers in the worker table, what it would cost them, who gives."""

    rows: IntArray
    view: PolicyView
    costs: Costs
    sources: list[Source]


@dataclass(frozen=True, slots=True)
class Pair:
    """Positions in the two sides. handoff_s: see the module; the score is to be compared with `alone_s`.

    prefill_scores, decode_scores: of each candidate with the best partner; inf for those that were not looked at.
    """

    first: Side
    prefill: int
    decode: int
    score: float
    handoff_s: float
    prefill_scores: FloatArray
    decode_scores: FloatArray


def alone_s(side: Side) -> FloatArray:
    """What the whole request costs on each candidate, to compare with a pair."""
    return side.costs.predicted_ttft_s + side.costs.harm_s + _stall_s(side)


def prefill_part_s(side: Side) -> FloatArray:
    """What the first part costs."""
    harm = side.costs.harm
    return side.costs.predicted_ttft_s + harm["delay_harm_s"] + harm["eviction_harm_s"] + _stall_s(side)


def decode_part_s(request: PolicyRequest, side: Side) -> FloatArray:
    """What the second part costs, the handoff aside."""
    harm, rows = side.costs.harm, side.view.rows
    rest_s = _rest_tokens(request) * rows["prefill_token_s"] * rows["decoding"]
    result: FloatArray = harm["decode_harm_s"] + harm["occupancy_harm_s"] + harm["eviction_harm_s"] + rest_s
    return result


def shortlist(part_s: FloatArray, may: BoolArray, most: int) -> IntArray:
    """Positions of the `most` best of those that may, best first."""
    found = np.flatnonzero(may)
    order = np.argsort(part_s[found], kind="stable")
    result: IntArray = found[order[:most]]
    return result


def best_pair(
    request: PolicyRequest,
    prefill: Side,
    decode: Side,
    *,
    firsts: IntArray,
    seconds: IntArray,
    links: LinkArrays,
    queue_bytes: FloatArray,
) -> Pair | None:
    """The pair that costs least of some candidates, none where they have nothing to hand over.

    firsts, seconds: positions in the sides. links: [first, second], of the pull. queue_bytes: of each first.
    """
    blocks = request.usable_blocks - decode.view.local_blocks[seconds]
    if not len(firsts) or not len(seconds) or not blocks.any():
        return None
    own_s = decode_part_s(request, decode)[seconds][:, None] + prefill_part_s(prefill)[firsts]
    handoff_s = _handoff_s(request, prefill, decode, firsts, seconds, blocks, links, queue_bytes)
    # Whoever holds the whole prompt already takes it alone.
    scores = np.where(blocks[:, None] > 0, own_s + handoff_s, np.inf)
    second, first = np.unravel_index(int(scores.argmin()), scores.shape)
    return Pair(
        first=prefill,
        prefill=int(firsts[first]),
        decode=int(seconds[second]),
        score=float(scores[second, first]),
        handoff_s=float(handoff_s[second, first]),
        prefill_scores=_spread(scores.min(axis=0), firsts, len(prefill.rows)),
        decode_scores=_spread(scores.min(axis=1), seconds, len(decode.rows)),
    )


def handed_over(first: Placement, second: Placement, giver: Source, request: PolicyRequest, pair: Pair) -> Placement:
    """The placement of a pair. first, second: of either part as if it were all; giver: the first part's worker."""
    local = second.local_blocks
    run = pull_run(giver, local, request.usable_blocks)
    run = replace(run, wait_s=_LEAST_WAIT_S + 2.0 * first.predicted_ttft_s)
    rest = _rest_tokens(request)
    ready_s = first.predicted_ttft_s + pair.handoff_s
    second = replace(
        second,
        pull_plan=[run],
        predicted_ttft_s=ready_s,
        prefill_tokens=rest,
        prefill_pairs=float(pairs_of(request.prompt_tokens - rest, rest)),
        num_blocks=1 + run.num_blocks,
        pulled_bytes=((run.holder, second.block_bytes * run.num_blocks),),
        work_s=second.work_s - second.prefill_s,
        prefill_s=0.0,
        prediction=replace(second.prediction, ttft_s=ready_s, uncorrected_ttft_s=ready_s),
    )
    return replace(first, work_s=first.prefill_s, handoff=second)


def _handoff_s(
    request: PolicyRequest,
    prefill: Side,
    decode: Side,
    firsts: IntArray,
    seconds: IntArray,
    blocks: IntArray,
    links: LinkArrays,
    queue_bytes: FloatArray,
) -> FloatArray:
    """[second, first], see the module."""
    rows, others = prefill.view.rows, decode.view.rows
    num_bytes = (blocks * others["block_bytes"][seconds])[:, None]
    # Blocks of the prompt's last step can only be pulled after it.
    last_bytes = others["block_bytes"][seconds][:, None] * np.ceil(rows["step_tokens"][firsts] / request.block_tokens)
    rate, setup_s = links.bytes_per_s.T, links.setup_s.T
    pull_s = setup_s + (queue_bytes + num_bytes) / rate
    tail_s = np.maximum(pull_s - prefill.costs.prefill_s[firsts], setup_s + np.minimum(num_bytes, last_bytes) / rate)
    busy_s = np.maximum(0.0, decode.costs.queue_s[seconds][:, None] - prefill.costs.predicted_ttft_s[firsts])
    rest_s = others["least_step_s"][seconds] + _rest_tokens(request) * others["prefill_token_s"][seconds]
    result: FloatArray = _OVERHEAD_S + tail_s + busy_s + rest_s[:, None]
    return result


def _stall_s(side: Side) -> FloatArray:
    """Time that the running streams of each candidate wait for the prompt's own part of its steps."""
    costs, rows = side.costs, side.view.rows
    own_s = costs.prefill_tokens * rows["prefill_token_s"] + costs.prefill_pairs * rows["prefill_pair_s"]
    result: FloatArray = own_s * rows["decoding"]
    return result


def _spread(values: FloatArray, at: IntArray, count: int) -> FloatArray:
    """`values` at their positions among `count`, inf elsewhere."""
    result: FloatArray = np.full(count, np.inf)
    result[at] = values
    return result


def _rest_tokens(request: PolicyRequest) -> int:
    """Tokens of the last block, which is not pulled."""
    return request.prompt_tokens - request.usable_blocks * request.block_tokens
