"""A model's runner with the sampler behind it: what the engine's loop runs its steps on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from services.worker.draws import DrawRow, Draws, Hidden, ReadRow, ScoreRow
from services.worker.messages import PositionLogprob
from services.worker.model.step import Runner, StepInput
from services.worker.sampler import draw_tokens, score_tokens


class Sampled:
    """A StepRunner (loop.py) over a Runner (model/step.py)."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def submit(self, step: StepInput) -> None:
        """Start a step."""
        self._runner.submit(step)

    def draw(self, rows: Sequence[DrawRow], reads: Sequence[ReadRow] = ()) -> Draws:
        """Wait for the step's logits, draw from the first of them and read the rest."""
        logits = self._runner.collect()
        draws = draw_tokens(logits[: len(rows)], rows)
        return replace(draws, reads=self._read(logits[len(rows) :], reads)) if reads else draws

    def _read(self, logits: torch.Tensor, reads: Sequence[ReadRow]) -> list[PositionLogprob | Hidden | None]:
        scored = {i: read for i, read in enumerate(reads) if isinstance(read, ScoreRow)}
        found: list[PositionLogprob | Hidden | None] = [None] * len(reads)
        for i, score in zip(scored, score_tokens(logits[list(scored)], list(scored.values())), strict=True):
            found[i] = score
        if len(scored) < len(reads):
            hidden: Hidden = self._runner.hidden()[-len(reads) :].numpy()
            for i in (i for i in range(len(reads)) if i not in scored and np.isfinite(hidden[i]).all()):
                found[i] = hidden[i]
        return found
