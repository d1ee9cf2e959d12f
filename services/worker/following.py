"""What the scheduler's side knows of grammars. What compiles and follows them is in engine/grammars.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.worker.errors import Refused


class CompiledGrammar(Protocol):
    """A grammar that answers can be held to."""

    def follower(self) -> Follower:
        """One at the beginning of an answer."""


class Follower(Protocol):
    """One choice's place in its grammar. failure: why it has given up, "" while it has not."""

    failure: str

    def allowed(self, output: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_] | None:
        """Which tokens may follow the whole `output` of the choice, bool [vocab_size]; None when it has given up."""


class GrammarSource(Protocol):
    """Where an engine has its grammars compiled."""

    @property
    def is_settled(self) -> bool:
        """Whether nothing is to be taken, now or later."""

    def begin(self, key: int, grammar: str) -> None:
        """Compile the grammar of request `key`."""

    def take(self) -> Sequence[tuple[int, CompiledGrammar | Refused]]:
        """What has become of grammars since the last call, by request; of those that cannot be followed, why."""
