"""A model small enough to check by hand: what follows a prefix is a hash of everything the KV cache says about it.

Each cache entry is a hash of the whole prefix up to its token, and a token drawn depends on every entry of its context,
so that one wrong, stale or foreign block anywhere changes the output.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from services.common.blocks import BLOCK_TOKENS
from services.worker.model.step import StepInput

VOCAB = 97
_MASK = (1 << 61) - 1


def entry(before: int, token: int) -> int:
    """The cache entry of `token` after the entry `before` (0 at the start)."""
    return (before * 6364136223846793005 + token * 1442695040888963407 + 1) & _MASK


@cache
def expected_tokens(prompt: tuple[int, ...], count: int, words: int = VOCAB) -> list[int]:
    """What the toy generates greedily after `prompt`; words: see ToyRunner."""
    entries: list[int] = []
    for token in prompt:
        entries.append(entry(entries[-1] if entries else 0, token))
    output: list[int] = []
    for _ in range(count):
        output.append(_next_token(entries, words))
        entries.append(entry(entries[-1], output[-1]))
    return output


def prefix_entries(tokens: list[int]) -> list[int]:
    """Cache entries of a whole prefix."""
    entries: list[int] = []
    for token in tokens:
        entries.append(entry(entries[-1] if entries else 0, token))
    return entries


def _next_token(entries: list[int], words: int) -> int:
    return sum(entries) % 1_000_003 % words


class ToyRunner:
    """The Runner of the toy model, its cache in a plain array."""

    def __init__(self, num_blocks: int, words: int = VOCAB) -> None:
        """words: tokens below this are generated; with few of them, what follows can often be guessed."""
        self._words = words
        self.kv = np.zeros((num_blocks, BLOCK_TOKENS), dtype=np.int64)
        self.steps = 0
        self.fail_next = False
        self.fail_collect = False
        self._logits = torch.empty(0, VOCAB)

    def submit(self, step: StepInput) -> None:
        """Compute a step."""
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the toy was told to fail")
        self.steps += 1
        next_tokens = np.zeros(len(step.token_ids), dtype=np.int64)
        for index in range(len(step.context_lens)):
            first, end = int(step.query_starts[index]), int(step.query_starts[index + 1])
            context = int(step.context_lens[index])
            table = step.block_tables[index]
            start = context - (end - first)
            assert list(step.positions[first:end]) == list(range(start, context))
            cached = [int(self.kv[table[p // BLOCK_TOKENS], p % BLOCK_TOKENS]) for p in range(start)]
            for offset in range(first, end):
                position = start + offset - first
                cached.append(entry(cached[-1] if cached else 0, int(step.token_ids[offset])))
                slot = table[position // BLOCK_TOKENS]
                assert slot >= 0
                self.kv[slot, position % BLOCK_TOKENS] = cached[-1]
                next_tokens[offset] = _next_token(cached, self._words)
        logits = torch.zeros(len(step.logit_rows), VOCAB)
        logits[torch.arange(len(step.logit_rows)), torch.from_numpy(next_tokens[step.logit_rows])] = 10.0
        self._logits = logits

    def collect(self) -> torch.Tensor:
        """Logits of the submitted step."""
        if self.fail_collect:
            self.fail_collect = False
            raise RuntimeError("the toy was told to fail")
        return self._logits
