"""Bounds what drafts may cost: compares the time of steps with drafts to that of plain ones, and keeps accounts. Pure.

One account for each number of decoding sequences, counted in plain steps of as many. A step with drafts enters what its
accepted tokens would have taken without it, less its own time. A plain step enters a small allowance, of which the next
attempts are paid. Only an account that is not overdrawn may draft, so that all drafts together cost at most
ALLOWANCE of the plain time, and at the start one bad step: whatever rows cost, and however badly guesses fare. Where
drafts lose, attempts become as rare as that; where they gain, nothing is in their way.

The comparison needs plain steps: one is made now and then however well drafts do.
"""

from __future__ import annotations

from dataclasses import dataclass

# Of a plain step's time, what it gives drafts to lose.
ALLOWANCE = 1 / 64
# Most that past gains let later drafts lose, in plain steps.
MOST_CREDIT = 2.0
# A step that takes so many times a plain one's time counts as no more: something else has held it up.
MOST_RATIO = 4.0
# Steps with drafts before the next plain one.
PLAIN_EVERY = 24
# Plain steps before the first draft.
_LEAST_PLAIN = 2
# Of what is known of plain steps, the part that is forgotten with each step.
_FORGOTTEN = 0.05


@dataclass(slots=True)
class _Account:
    """plain_s: mean time of a plain step, of `num_plain`. since_plain: steps with drafts since then. balance: in plain
    steps.
    """

    plain_s: float = 0.0
    num_plain: int = 0
    since_plain: int = 0
    balance: float = 0.0


class DraftLedger:
    """Of one engine."""

    def __init__(self, most_sequences: int) -> None:
        """most_sequences: more never draft."""
        self._accounts = [_Account() for _ in range(most_sequences)]

    def may_draft(self, num_sequences: int) -> bool:
        """Whether a step of so many decoding sequences may have drafts."""
        if not 1 <= num_sequences <= len(self._accounts):
            return False
        account = self._accounts[num_sequences - 1]
        return account.num_plain >= _LEAST_PLAIN and account.since_plain < PLAIN_EVERY and account.balance >= 0

    def observe(self, num_sequences: int, drafted: int, accepted: int, step_s: float) -> None:
        """A step of decoding sequences alone has run. drafted, accepted: guesses in it, and those that have held."""
        if not 1 <= num_sequences <= len(self._accounts) or step_s <= 0:
            return
        account = self._accounts[num_sequences - 1]
        if not drafted:
            _learn(account, step_s)
            gain = ALLOWANCE
        else:
            account.since_plain += 1
            gain = (num_sequences + accepted) / num_sequences - min(step_s / account.plain_s, MOST_RATIO)
        account.balance = min(account.balance + gain, MOST_CREDIT)


def _learn(account: _Account, step_s: float) -> None:
    if account.num_plain:
        step_s = min(step_s, MOST_RATIO * account.plain_s)
    account.num_plain += 1
    weight = max(1.0 / account.num_plain, 1.0 - (1.0 - _FORGOTTEN) ** (1 + account.since_plain))
    account.plain_s += weight * (step_s - account.plain_s)
    account.since_plain = 0
