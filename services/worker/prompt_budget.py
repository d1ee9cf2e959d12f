"""How many tokens of prompts a step computes beside what decodes, and of which sequences. Pure.

What is prepared here while another worker goes on with it, and what that says meanwhile, is computed in small pieces
beside decodes: all of these wait for the step, and nobody waits for the pieces, or one client does for the last.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from services.worker.chunk import Chunk, prompt_chunk
from services.worker.patience import is_patient
from services.worker.sequence import Sequence

MIN_PREFILL_TOKENS = 32
# Tokens of a piece, or the inverse of its share in a longer rest, or there would be no end of that.
PIECE_TOKENS = 8
_REST_PIECES = 8


def prompt_budget(token_budget: int, decoding: Items[Chunk], catching_up: Items[Chunk]) -> int:
    """Tokens of prompts in a step beside decodes and chunks of sequences that catch up."""
    # However many decode, prefills go on, or the first long answers would shut out everybody else.
    least = min(token_budget, MIN_PREFILL_TOKENS)
    if any(not (chunk.sequence.request.is_held or is_patient(chunk.sequence.request)) for chunk in catching_up):
        # Where one of these has taken over, its client waits for this one step: it is kept short. Beside one whose
        # source still draws nobody waits, but nothing here tells it from the others.
        return least
    return max(token_budget - len(decoding), least)


def catch_up_chunks(sequences: Iterable[Sequence], readable: int, *, in_pieces: bool) -> list[Chunk]:
    """Of each of them that catches up: all that is due, or a piece of it.

    readable: most prompt tokens that may be read (Chunk.read). in_pieces: beside decodes that clients wait for.
    """
    behind = [one for one in sequences if one.has_slots and one.is_catching_up]
    return [prompt_chunk(one, PIECE_TOKENS if in_pieces else one.num_due, readable) for one in behind]


def prompt_chunks(sequences: Iterable[Sequence], budget: int, readable: int, *, in_pieces: bool) -> list[Chunk]:
    """Of the first of them, as many tokens together; the next one is asked for while any are left.

    in_pieces: beside decodes that clients wait for; then a piece of the first held one is in, and nothing of others.
    """
    chunks: list[Chunk] = []
    has_held = False
    for sequence in sequences if budget > 0 else ():
        is_piece = in_pieces and sequence.request.is_held
        if is_piece and has_held:
            continue
        chunk = prompt_chunk(sequence, min(budget, _held_piece(sequence)) if is_piece else budget, readable)
        if not chunk.length:
            continue
        has_held |= is_piece
        budget -= chunk.length
        readable -= chunk.read
        chunks.append(chunk)
        if not budget:
            break
    return chunks


def _held_piece(sequence: Sequence) -> int:
    return max(PIECE_TOKENS, sequence.num_due // _REST_PIECES)
