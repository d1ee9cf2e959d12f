"""How much an engine has before it: what a router needs to forecast when a further request would be served. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.common.fair_queue import NUM_CLASSES, class_index
from services.common.step_costs import pairs_of
from services.worker.sequence import Sequence


@dataclass(frozen=True, slots=True)
class QueueState:
    """Tokens admitted and not computed, known prefix hits of those that wait left out; pulls are not counted.

    waiting_tokens: those of them that no step has begun, by class. prefill_pairs: of prompt tokens with the tokens
    before them. context_tokens: of the decoding sequences.
    """

    prefill_tokens: int
    prefill_pairs: float
    waiting_tokens: tuple[int, ...]
    decoding_sequences: int
    context_tokens: int


def queue_state(
    running: Iterable[Sequence], waiting: Iterable[Sequence], expected_tokens: Callable[[Sequence], int]
) -> QueueState:
    """The present state. expected_tokens: what a waiting sequence will have computed."""
    tokens, pairs, decoding, context = 0, 0.0, 0, 0
    by_class = [0] * NUM_CLASSES
    for sequence in running:
        if sequence.num_missing == 1:
            decoding += 1
            context += sequence.num_tokens
        else:
            tokens += sequence.num_missing
            pairs += pairs_of(sequence.num_computed, sequence.num_missing)
    for sequence in waiting:
        expected = expected_tokens(sequence)
        tokens += expected
        pairs += pairs_of(sequence.num_tokens - expected, expected)
        by_class[class_index(sequence.request.priority)] += expected
    return QueueState(tokens, pairs, tuple(by_class), decoding, context)
