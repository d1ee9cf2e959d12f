"""How many tokens of prompts a step computes beside what decodes, and of which sequences. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from services.worker.chunk import Chunk, prompt_chunk
from services.worker.patience import is_patient
from services.worker.sequence import Sequence

MIN_PREFILL_TOKENS = 32


def prompt_budget(token_budget: int, decoding: Items[Chunk], catching_up: Items[Chunk]) -> int:
    """Tokens of prompts in a step beside decodes and chunks of sequences that catch up."""
    # However many decode, prefills go on, or the first long answers would shut out everybody else.
    least = min(token_budget, MIN_PREFILL_TOKENS)
    if any(chunk.draws and not is_patient(chunk.sequence.request) for chunk in catching_up):
        # Where one of these has taken over, its client waits for this one step: it is kept short. Beside one whose
        # source still draws nobody waits, but nothing here tells it from the others.
        return least
    return max(token_budget - len(decoding), least)


def prompt_chunks(sequences: Iterable[Sequence], budget: int, readable: int) -> list[Chunk]:
    """Of the first of them, as many tokens together; the next one is asked for while any are left.

    readable: most prompt tokens that may be read (Chunk.read).
    """
    chunks: list[Chunk] = []
    for sequence in sequences if budget > 0 else ():
        chunk = prompt_chunk(sequence, budget, readable)
        if not chunk.length:
            continue
        budget -= chunk.length
        readable -= chunk.read
        chunks.append(chunk)
        if not budget:
            break
    return chunks
