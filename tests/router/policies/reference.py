"""What a request costs one worker, in plain arithmetic: what the arrays of `costs` are compared with. No pulls."""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.common.fair_queue import NUM_CLASSES, class_index
from services.router.policies.correction import LENGTH_BORDERS, OVERHEAD_S, QUEUE_BORDERS_S, Correction
from services.router.policies.harm import MAX_SHARE
from services.router.policies.view import PolicyRequest, PolicyView

MIN_PREFILL_TOKENS = 32.0


@dataclass(frozen=True)
class Reference:
    """Seconds, of one candidate."""

    queue_s: float
    prefill_s: float
    interference_s: float
    predicted_ttft_s: float
    predicted_tpot_s: float
    harm_s: float
    work_s: float


def costs_of(request: PolicyRequest, view: PolicyView, at: int) -> Reference:
    """Costs of `request` on the candidate number `at`."""
    rows, local = view.rows, int(view.local_blocks[at])

    def row(name: str) -> float:
        return float(rows[name][at])

    def later(name: str) -> float:
        return sum(float(rows[name][at][number]) for number in range(class_index(request.priority) + 1, NUM_CLASSES))

    # What is computed before it.
    reported = row("queued_tokens") - later("waiting_by_class")
    tokens = reported + row("pending_tokens") - later("pending_by_class")
    pairs = row("queued_pairs") * reported / max(1.0, row("queued_tokens")) + row("pending_pairs")
    to_decode = max(0.0, row("running") + row("waiting") - row("decoding")) + row("pending")
    decoding = row("decoding") + max(0.0, to_decode - 1) / 2
    step_s = row("fixed_s") + min(1.0, decoding) * row("decoding_s") + decoding * row("decode_sequence_s")
    step_s += row("context_tokens") * row("context_token_s")
    room = max(row("step_tokens") - row("decoding"), min(row("step_tokens"), MIN_PREFILL_TOKENS))
    ahead_s = tokens * row("prefill_token_s") + pairs * row("prefill_pair_s") + tokens / room * step_s
    elapsed_s = max(0.0, request.now_s - row("told_s"))
    ahead_s -= min(elapsed_s, ahead_s * reported / max(1.0, tokens))
    ahead_s = max(ahead_s, step_s / 2 if row("decoding") else 0.0)

    # A place in the batch, and blocks.
    output_tokens = request.expected_output_tokens * request.num_choices
    service_s = request.expected_output_tokens * row("decode_step_s")
    above = row("running") + row("waiting") + row("pending") + request.num_choices - row("max_running")
    needed = math.ceil(request.prompt_tokens / request.block_tokens) - local
    lacks = needed + row("pending_blocks") > row("free_blocks")
    for_blocks_s = service_s / max(1.0, row("running")) if lacks else 0.0
    queue_s = ahead_s + max(max(0.0, above) / row("max_running") * service_s, for_blocks_s)

    # Its own prompt, alone and beside what decodes.
    own = request.prompt_tokens - local * request.block_tokens
    own_pairs = own * (local * request.block_tokens + own / 2)
    alone_steps = math.ceil(own / row("step_tokens"))
    prefill_s = own * row("prefill_token_s") + own_pairs * row("prefill_pair_s") + alone_steps * row("fixed_s")
    prefill_s = max(prefill_s, row("least_step_s"))
    steps = math.ceil((tokens + own) / room) - tokens / room
    beside_s = max(0.0, steps * step_s - alone_steps * row("fixed_s"))

    # Its output, and what it takes from others.
    others = row("decoding") + row("waiting") + row("pending")
    together = others + request.num_choices
    decode_s = row("fixed_s") + row("decoding_s") + row("decode_slope_s") * together
    output_s = output_tokens * decode_s / together
    share = min(float(view.pressure.prefill_share[at]), MAX_SHARE)
    tpot_s = decode_s + min(decode_s * share / (1 - share), room * row("prefill_token_s"))
    unused = max(0.0, row("free_blocks") - row("cached_blocks") - row("pending_blocks"))
    evicted = min(max(0.0, needed - unused), row("cached_blocks"))
    busy_s = (queue_s + prefill_s) / (1 - min(view.pressure.utilisation, MAX_SHARE))
    harm_s = (
        output_tokens * row("decode_slope_s") * others
        + prefill_s * busy_s * view.pressure.arrivals_per_s
        + output_s * min(view.pressure.utilisation, 1.0)
        + evicted * request.block_tokens * row("prefill_token_s") * view.pressure.reuse
    )
    return Reference(
        queue_s=queue_s,
        prefill_s=prefill_s,
        interference_s=beside_s,
        predicted_ttft_s=row("pace") * _corrected_s(view.correction, queue_s, prefill_s, beside_s, own),
        predicted_tpot_s=row("pace") * view.correction.tpot * tpot_s,
        harm_s=harm_s,
        work_s=prefill_s + output_s,
    )


def _corrected_s(correction: Correction, queue_s: float, prefill_s: float, others_s: float, tokens: int) -> float:
    overhead, *weights, others = correction.weights
    borders_s = (0.0, *QUEUE_BORDERS_S, math.inf)
    total_s = overhead * OVERHEAD_S + others * others_s
    for number in range(len(QUEUE_BORDERS_S) + 1):
        total_s += weights[number] * max(0.0, min(queue_s, borders_s[number + 1]) - borders_s[number])
    longer_than = sum(tokens > border for border in LENGTH_BORDERS)
    return total_s + weights[len(QUEUE_BORDERS_S) + 1 + longer_than] * prefill_s
