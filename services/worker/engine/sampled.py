"""A model's runner with the sampler behind it: what the engine's loop runs its steps on."""

from __future__ import annotations

from collections.abc import Sequence

from services.worker.draws import DrawRow, Draws
from services.worker.model.step import Runner, StepInput
from services.worker.sampler import draw_tokens


class Sampled:
    """A StepRunner (loop.py) over a Runner (model/step.py)."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def submit(self, step: StepInput) -> None:
        """Start a step."""
        self._runner.submit(step)

    def draw(self, rows: Sequence[DrawRow]) -> Draws:
        """Wait for the step's logits and draw from them."""
        return draw_tokens(self._runner.collect(), rows)
