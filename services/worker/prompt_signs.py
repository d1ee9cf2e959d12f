"""When the caller of a request hears that its prompt gets on: a long one, or one that gives way, says nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from services.worker.chunk import Chunk
from services.worker.messages import PromptAdvanced

# Often beside the longest silence within one attempt that any gateway allows.
EVERY_S = 1.0


def signs(chunks: Sequence[Chunk], now: float) -> list[PromptAdvanced]:
    """What is to be said of a step's requests that it has told nothing else, and that were silent for a while."""
    told: list[PromptAdvanced] = []
    for chunk in chunks:
        request = chunk.sequence.request
        if chunk.draws or chunk.read:
            request.told_s = now
        elif now - max(request.told_s, request.arrival_s) >= EVERY_S:
            request.told_s = now
            told.append(PromptAdvanced(request.key))
    return told
