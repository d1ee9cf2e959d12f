"""From the chunks of a step to how their tokens are drawn, and from drawn tokens to what is said of them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import cast

import numpy as np

from services.worker.chunk import Advance, Chunk
from services.worker.draws import DrawRow, Draws, Hidden, HiddenRow, ReadRow, ScoreRow
from services.worker.messages import ChoiceOutput, PositionLogprob, PromptEmbedded, PromptScored

_LEAST_NORM = 1e-12
_Reads = list[PositionLogprob | Hidden]


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a chunk has drawn that holds. is_sound: whether no logits of it were anything but numbers."""

    tokens: list[int]
    logprobs: list[PositionLogprob]
    is_sound: bool = True


def draw_rows(chunks: Sequence[Chunk]) -> list[DrawRow]:
    """How to draw the tokens of a step, one row for each draw of each chunk.

    Grammars are followed here: call it while the device computes the step.
    """
    return [row for chunk in chunks if chunk.draws for row in _chunk_rows(chunk)]


def read_rows(chunks: Sequence[Chunk]) -> list[ReadRow]:
    """What a step is to tell of prompt tokens, in the order of its chunks."""
    return [row for chunk in chunks if chunk.read for row in _read_rows(chunk)]


def reads_of(chunks: Sequence[Chunk], draws: Draws) -> list[_Reads | None]:
    """Of each chunk what was read, from the rows of `read_rows`; None where some of it was no number."""
    rows = iter(draws.reads)
    taken = [list(islice(rows, chunk.read)) for chunk in chunks]
    return [None if any(read is None for read in reads) else cast(_Reads, reads) for reads in taken]


def told_of(chunk: Chunk, reads: _Reads) -> PromptScored | PromptEmbedded | None:
    """What is to be said of a chunk's prompt tokens, before the chunk is committed; None: nothing yet.

    Sums are made token by token, so that they do not depend on where the prompt was cut.
    """
    request = chunk.sequence.request
    if not request.embeds:
        logprobs = [read for read in reads if isinstance(read, PositionLogprob)]
        return PromptScored(request.key, request.rows_read + 1, _scored_tokens(chunk), logprobs) if logprobs else None
    for read in reads:
        hidden = np.asarray(read, np.float64)
        request.pooled = hidden if request.pooled is None else request.pooled + hidden
    if request.rows_read + chunk.read < request.rows_to_read or request.pooled is None:
        return None
    unit = request.pooled / max(float(np.linalg.norm(request.pooled)), _LEAST_NORM)
    return PromptEmbedded(request.key, unit.astype("<f4").tobytes())


def drawn_of(chunks: Sequence[Chunk], draws: Draws) -> list[Drawn]:
    """What each chunk has drawn, from the rows of `draw_rows`.

    After a token that was not the guess in its place nothing holds, nor after one that ends the choice.
    """
    rows = zip(draws.tokens, draws.logprobs, strict=True)
    drawn = [_holding(chunk, list(islice(rows, chunk.num_draws))) for chunk in chunks]
    assert next(rows, None) is None, "more draws than chunks have asked for"
    return drawn


def faults(
    chunks: Sequence[Chunk], drawn: Sequence[Drawn], reads: Sequence[_Reads | None]
) -> Iterator[tuple[int, str, str]]:
    """Key, code and detail of the requests whose grammar has given up or whose logits are no numbers."""
    for chunk, one, read in zip(chunks, drawn, reads, strict=True):
        key, follower = chunk.sequence.request.key, chunk.sequence.follower
        if chunk.draws and follower is not None and follower.failure:
            yield key, "INVALID_ARGUMENT", follower.failure
        elif not one.is_sound or read is None:
            yield key, "INTERNAL", "the model's output is not a number"


def output_of(advance: Advance, drawn: Drawn) -> ChoiceOutput:
    """What is said of the tokens that a sequence has drawn."""
    sequence, request = advance.sequence, advance.sequence.request
    return ChoiceOutput(
        request.key,
        sequence.choice,
        drawn.tokens,
        drawn.logprobs,
        advance.finish,
        accelerator_s=request.accelerator_s,
        position=sequence.num_output - len(drawn.tokens),
    )


def _chunk_rows(chunk: Chunk) -> Iterator[DrawRow]:
    sequence, request = chunk.sequence, chunk.sequence.request
    start, known = len(request.prompt), sequence.num_tokens
    allowed = None if sequence.follower is None else sequence.follower.allowed(sequence.output)
    for position in range(known, known + chunk.num_draws):
        yield DrawRow(
            sampling=request.sampling,
            choice=sequence.choice,
            position=position,
            prompt=request.prompt,
            output=sequence.tokens[start:position],
            allowed=allowed,
            drafted=int(sequence.tokens[position]) if position < known + chunk.drafted else None,
        )


def _read_rows(chunk: Chunk) -> list[ReadRow]:
    request = chunk.sequence.request
    if request.embeds:
        return [HiddenRow()] * chunk.read
    return [ScoreRow(token, request.sampling.num_prompt_logprobs or 0) for token in _scored_tokens(chunk)]


def _scored_tokens(chunk: Chunk) -> list[int]:
    first = chunk.sequence.request.rows_read + 1
    tokens: list[int] = chunk.sequence.tokens[first : first + chunk.read].tolist()
    return tokens


def _holding(chunk: Chunk, rows: list[tuple[int | None, PositionLogprob | None]]) -> Drawn:
    sequence = chunk.sequence
    guesses = sequence.tokens[sequence.num_tokens : sequence.num_tokens + chunk.drafted].tolist()
    tokens: list[int] = []
    logprobs: list[PositionLogprob] = []
    for (token, logprob), guess in zip(rows, [*guesses, None], strict=False):
        if token is None:
            return Drawn([], [], is_sound=False)
        tokens.append(token)
        logprobs += [] if logprob is None else [logprob]
        if token != guess or token in sequence.request.stop_token_ids:
            break
    return Drawn(tokens, logprobs)
