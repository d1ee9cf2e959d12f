"""When an engine gets to a further prompt: its steps, in the order in which its scheduler takes the work.

Each step computes one token of every decoding sequence first and fills its budget of tokens with prompts: those that
have begun, then those that wait, by class and arrival. So a prompt is done after

    ceil((tokens ahead + its own) / room for prompts in a step) steps,

each of which takes what a step takes with the present decodes, beside the prompts' own time. What was ahead at the
last report shrinks with the time since.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.common.fair_queue import NUM_CLASSES, class_index
from services.common.step_costs import pairs_of
from services.router.policies.view import FloatArray, IntArray, PolicyRequest, WorkerRows

# Prompt tokens that a step takes in however much is decoding; the worker's scheduler has the same number.
_MIN_PREFILL_TOKENS = 32.0


@dataclass(slots=True)
class Ahead:
    """Work before the request on each candidate: tokens, the steps they fill, and seconds until all is computed.

    room: for prompt tokens in a step. step_s: of every step beside its prompts' own time.
    """

    tokens: FloatArray
    steps: FloatArray
    seconds: FloatArray
    room: FloatArray
    step_s: FloatArray


@dataclass(slots=True)
class Decodes:
    """Those that will decode beside the request, with whom it will be together, and a decode step of them all."""

    others: FloatArray
    together: FloatArray
    step_s: FloatArray


def work_ahead(request: PolicyRequest, rows: WorkerRows) -> Ahead:
    """See Ahead."""
    # Reported tokens that are computed first, and their share of all reported ones.
    queued = rows["queued_tokens"]
    reported = queued - _later(request, rows["waiting_by_class"])
    share = reported / np.maximum(1.0, queued)
    pairs = rows["queued_pairs"] * share + rows["pending_pairs"]
    step_s, room = _steps(rows)
    tokens = reported + (rows["pending_tokens"] - _later(request, rows["pending_by_class"]))
    steps = tokens / room
    computing_s = tokens * rows["prefill_token_s"] + pairs * rows["prefill_pair_s"] + steps * step_s
    # A step in flight is over after half its time, if nothing more is known of it.
    in_flight_s = (rows["decoding"] > 0) * (step_s / 2)
    most_s = computing_s * reported / np.maximum(1.0, tokens)
    elapsed_s = np.minimum(np.maximum(request.now_s - rows["told_s"], 0.0), most_s)
    return Ahead(tokens, steps, np.maximum(computing_s - elapsed_s, in_flight_s), room, step_s)


def decodes(request: PolicyRequest, rows: WorkerRows) -> Decodes:
    """See Decodes."""
    others = rows["decoding"] + rows["waiting"] + rows["pending"]
    together = others + request.num_choices
    return Decodes(others, together, rows["fixed_s"] + rows["decoding_s"] + rows["decode_slope_s"] * together)


def prefill_s(request: PolicyRequest, rows: WorkerRows, held: IntArray) -> FloatArray:
    """Computing what follows `held` blocks of the prompt when nothing else is there.

    held: of each candidate, or [any, candidate or 1], and the result likewise.
    """
    start = held * request.block_tokens
    tokens = request.prompt_tokens - start
    seconds = (
        tokens * rows["prefill_token_s"]
        + pairs_of(start, tokens) * rows["prefill_pair_s"]
        + np.ceil(tokens / rows["step_tokens"]) * rows["fixed_s"]
    )
    result: FloatArray = np.maximum(seconds, rows["least_step_s"])
    return result


def interference_s(ahead: Ahead, rows: WorkerRows, tokens: IntArray) -> FloatArray:
    """What decoding sequences add to the steps in which the request's own `tokens` are computed."""
    steps = np.ceil((ahead.tokens + tokens) / ahead.room) - ahead.steps
    alone = np.ceil(tokens / rows["step_tokens"])
    result: FloatArray = np.maximum(0.0, steps * ahead.step_s - alone * rows["fixed_s"])
    return result


def _steps(rows: WorkerRows) -> tuple[FloatArray, FloatArray]:
    decoding = rows["decoding"]
    # One after the other those that are ahead will be decoding: half of all but the last, on average.
    ahead = np.maximum(0.0, rows["running"] + rows["waiting"] - decoding) + rows["pending"]
    by_then = decoding + np.maximum(0.0, ahead - 1.0) / 2
    decode_s = (
        np.minimum(1.0, by_then) * rows["decoding_s"]
        + by_then * rows["decode_sequence_s"]
        + rows["context_tokens"] * rows["context_token_s"]
    )
    budget = rows["step_tokens"]
    room = np.maximum(budget - decoding, np.minimum(budget, _MIN_PREFILL_TOKENS))
    return rows["fixed_s"] + decode_s, room


def _later(request: PolicyRequest, by_class: FloatArray) -> FloatArray | float:
    """Tokens of classes that the request overtakes."""
    later: FloatArray | float = 0.0
    for number in range(class_index(request.priority) + 1, NUM_CLASSES):
        later = by_class[:, number] if isinstance(later, float) else later + by_class[:, number]
    return later
