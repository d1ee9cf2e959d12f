"""How many tokens to draft for one sequence, by how its drafts have fared. Pure.

Guesses are taken to hold one after another with the same chance, the share of late. Each further row of a step costs
something, so guesses are made as long as all of them up to there hold with a chance that is worth it. A sequence whose
drafts are wrong from their first token on makes none for a while, which doubles each time.
"""

from __future__ import annotations

import math

# Guesses of earlier drafts count so much less with each draft.
_KEPT = 0.85
# What is assumed before there are any: half of so many.
_ASSUMED_GUESSES = 1.0
_LONGEST_PAUSE = 64


class DraftPace:
    """Of one sequence."""

    def __init__(self) -> None:
        self._held = 0.0
        self._judged = 0.0
        self._failures = 0
        self._resumes_at = 0

    @property
    def chance(self) -> float:
        """That the next guess holds, between 0 and 1."""
        return (self._held + _ASSUMED_GUESSES / 2) / (self._judged + _ASSUMED_GUESSES)

    def length(self, position: int, least_chance: float) -> int:
        """Guesses worth making at `position`, the number of tokens known. least_chance: of the last of them, 0 to 1."""
        if position < self._resumes_at or least_chance >= 1.0:
            return 0
        return int(math.log(least_chance) / math.log(self.chance))

    def observe(self, drafted: int, accepted: int, position: int) -> None:
        """Of a draft so many tokens have held. position: tokens known now."""
        self._held = self._held * _KEPT + accepted
        self._judged = self._judged * _KEPT + min(accepted + 1, drafted)
        if accepted:
            self._failures = 0
            return
        self._failures += 1
        self._resumes_at = position + min(2**self._failures, _LONGEST_PAUSE)
