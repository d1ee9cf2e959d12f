"""Speculative decoding: adds drafted tokens to a step's decodes, and learns which of them held. Pure.

A draft is what followed the sequence's latest tokens where they stood before (prompt_lookup.py). It lies behind the
known tokens in the sequence's array, is computed with them, and a token is drawn in each place; what was drawn holds as
far as the draft agrees with it, and one token further. So no output changes, only the number of steps; the KV of
guesses that did not hold is overwritten, and nothing is registered or told of them.

Only steps that compute no prompt draft, and only so many rows: rows beside a decode are almost free while reading the
weights takes the time; beyond, and beside a prompt, they cost what they would elsewhere. What drafts may lose in all is
bounded by the time that steps have taken with them and without (draft_ledger.py). There is no draft where a grammar
holds, none that blocks would be taken from others for, and none longer than the answer may become.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace

from services.common.blocks import BLOCK_TOKENS
from services.common.step_costs import StepCosts
from services.worker.block_pool import BlockPool
from services.worker.chunk import Chunk
from services.worker.draft_ledger import DraftLedger
from services.worker.drafting import Drafting
from services.worker.prompt_lookup import PromptLookup
from services.worker.sequence import Sequence, blocks_for

# A guess must bring so many times what its row costs, for what was learned of both is inexact.
_MARGIN = 2.0
# Of the time of a step of one sequence, the least that a further row is taken to cost.
_LEAST_ROW_SHARE = 0.01


class Speculation:
    """drafted, accepted: tokens so far, of all sequences."""

    def __init__(self, pool: BlockPool, max_tokens: int, max_rows: int) -> None:
        """max_tokens: most guesses of one sequence in a step. max_rows: most rows of a step, with its guesses."""
        self.drafted = 0
        self.accepted = 0
        self._pool = pool
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._ledger = DraftLedger(max_rows - 1)

    def extend(self, chunks: Items[Chunk], budget: int, costs: StepCosts, num_running: int) -> list[Chunk]:
        """The chunks with drafts where these are worth it. budget: tokens that may be added.

        costs: as learned of the engine's steps; num_running: sequences that each may need a block before long.
        """
        computes_prompts = not all(chunk.draws and chunk.length == 1 for chunk in chunks)
        budget = min(budget, self._max_rows - len(chunks))
        if not self._max_tokens or computes_prompts or budget <= 0 or not self._ledger.may_draft(len(chunks)):
            return list(chunks)
        least_chance = _least_chance(chunks, costs)
        extended: list[Chunk] = []
        for left, chunk in zip(range(len(chunks), 0, -1), chunks, strict=True):
            share = min(self._max_tokens, -(-budget // left))
            drafted = self._draft(chunk.sequence, share, least_chance, num_running)
            budget -= drafted
            extended.append(replace(chunk, length=1 + drafted, drafted=drafted) if drafted else chunk)
        return extended

    def observe(self, chunk: Chunk, accepted: int) -> None:
        """Of a chunk's draft so many tokens have held; its sequence knows them by now."""
        drafting = chunk.sequence.drafting
        if chunk.drafted and drafting is not None:
            self.drafted += chunk.drafted
            self.accepted += accepted
            drafting.pace.observe(chunk.drafted, accepted, chunk.sequence.num_tokens)

    def observe_step(self, chunks: Items[Chunk], drawn: Items[int], step_s: float) -> None:
        """A step has run in `step_s`. drawn: how many tokens each chunk has drawn that hold."""
        if self._max_tokens and all(chunk.draws and chunk.length == 1 + chunk.drafted for chunk in chunks):
            drafted = sum(chunk.drafted for chunk in chunks)
            self._ledger.observe(len(chunks), drafted, sum(max(0, count - 1) for count in drawn), step_s)

    def _draft(self, sequence: Sequence, most: int, least_chance: float, num_running: int) -> int:
        """Put guesses behind the known tokens of a sequence; how many."""
        request = sequence.request
        most = min(most, request.max_tokens - sequence.num_output - 1)
        if most <= 0 or request.sampling.grammar:
            return 0
        if sequence.drafting is None:
            sequence.drafting = Drafting(PromptLookup(len(sequence.tokens)))
        most = min(most, sequence.drafting.pace.length(sequence.num_tokens, least_chance))
        if most <= 0:
            return 0
        guesses = sequence.drafting.lookup.propose(sequence.tokens, sequence.num_tokens, most)
        guesses = guesses[: self._room(sequence, len(guesses), num_running)]
        sequence.tokens[sequence.num_tokens : sequence.num_tokens + len(guesses)] = guesses
        return len(guesses)

    def _room(self, sequence: Sequence, wanted: int, num_running: int) -> int:
        """Guesses that have slots, taking blocks only where all that run could still have a further one each."""
        missing = blocks_for(sequence.num_tokens + wanted) - len(sequence.slots)
        if missing > 0 and self._pool.num_available >= missing + num_running:
            slots = self._pool.allocate(missing)
            assert slots is not None
            sequence.use_slots(slots)
        return min(wanted, len(sequence.slots) * BLOCK_TOKENS - sequence.num_tokens)


def _least_chance(chunks: Items[Chunk], costs: StepCosts) -> float:
    """With which a guess must hold, so that its row brings more tokens for its time than the step does without it."""
    rows = len(chunks)
    context_tokens = sum(chunk.start + 1 for chunk in chunks)
    sequences_s = costs.decode_sequence_s * rows + costs.context_token_s * context_tokens
    step_s = costs.fixed_s + costs.decoding_s + sequences_s
    if step_s <= 0:
        return 1.0
    row_s = max(sequences_s / rows, _LEAST_ROW_SHARE * (step_s - sequences_s + sequences_s / rows))
    return min(1.0, _MARGIN * row_s * rows / step_s)
