"""What a rank of a group exchanges with the others in the midst of a step: the decoders' side of it."""

from __future__ import annotations

from typing import Protocol

import torch


class Seam(Protocol):
    """Every rank of a stage calls `sum` alike and in the same order; a stage `send`s what the next one `receive`s.

    All raise RankLost when another rank does not answer.
    """

    @property
    def sums(self) -> bool:
        """Whether there are others in this stage, so that what they compute must be summed."""

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds the tokens; else it receives the residual stream."""

    @property
    def is_last(self) -> bool:
        """Whether this stage gives logits; else it sends the residual stream on."""

    @property
    def first_token(self) -> int:
        """Token id of the first row of embedding and head."""

    def sum(self, values: torch.Tensor) -> None:
        """float32, in place: the sum over the ranks of the stage, in their order, the same bits for all of them."""

    def receive(self, residual: torch.Tensor) -> None:
        """Fill float32 [T, hidden] with what the stage before has sent."""

    def send(self, residual: torch.Tensor) -> None:
        """Send float32 [T, hidden] to the stage behind."""
