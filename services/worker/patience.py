"""Batch work beside what clients wait for: it is computed in steps without a prompt of a more urgent request. Pure.

Whoever has a prompt computed waits for all of its steps, so these compute no batch work, its decodes included; beside
decodes of others it costs them little. A step that is under way cannot be left, so whoever arrives waits for its end:
while more urgent requests come, batch work has short pieces of prompts. Where more urgent prompts never end, it still
has a part of one step in many, which is kept for it before they take theirs.
"""

from __future__ import annotations

from services.common.fair_queue import RequestClass
from services.worker.sequence import Request

# Since the last more urgent request; after that, nobody is expected.
_EXPECTED_S = 10.0
# Of a step's tokens, while somebody is.
_SHORT_SHARE = 8
# Steps in a row without batch work.
_MOST_STEPS_ASIDE = 20


def is_patient(request: Request) -> bool:
    """Whether nobody waits for it. One without a class counts as urgent."""
    return request.priority >= RequestClass.BATCH


class Patience:
    """How much batch work a step may have. Times are seconds of any one clock, the same in all calls."""

    def __init__(self) -> None:
        self._urgent_at_s = float("-inf")
        self._steps_aside = 0

    def urgent_seen(self, now: float) -> None:
        """A more urgent request is here."""
        self._urgent_at_s = now

    @property
    def is_due(self) -> bool:
        """Whether the next step computes batch work whatever else it does."""
        return self._steps_aside == _MOST_STEPS_ASIDE

    def stands_aside(self, *, beside_urgent: bool) -> bool:
        """Whether the next step computes no batch work. beside_urgent: it computes prompts of others.

        Called once for each step.
        """
        self._steps_aside = (self._steps_aside + 1) % (_MOST_STEPS_ASIDE + 1) if beside_urgent else 0
        return self._steps_aside > 0

    def most_tokens(self, token_budget: int, least: int, now: float) -> int:
        """Tokens of batch work's prompts in a step that does compute some, `least` at least."""
        if now - self._urgent_at_s >= _EXPECTED_S:
            return token_budget
        return min(token_budget, max(least, token_budget // _SHORT_SHARE))
