"""From the chunks of a step to how their tokens are drawn, and from drawn tokens to what is said of them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from services.worker.chunk import Advance, Chunk
from services.worker.draws import DrawRow, Draws
from services.worker.messages import ChoiceOutput, PositionLogprob


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


def drawn_of(chunks: Sequence[Chunk], draws: Draws) -> list[Drawn]:
    """What each chunk has drawn, from the rows of `draw_rows`.

    After a token that was not the guess in its place nothing holds, nor after one that ends the choice.
    """
    rows = zip(draws.tokens, draws.logprobs, strict=True)
    drawn = [_holding(chunk, list(islice(rows, chunk.num_draws))) for chunk in chunks]
    assert next(rows, None) is None, "more draws than chunks have asked for"
    return drawn


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
