"""The ledger bounds what drafts lose, whatever rows cost and guesses are worth, and lets those go on that gain."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from services.worker.draft_ledger import ALLOWANCE, MOST_RATIO, PLAIN_EVERY, DraftLedger

STEPS = 400


@dataclass
class Served:
    """Tokens drawn, seconds they took, and steps with drafts among `STEPS`."""

    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0


def serve(sequences: int, guesses: int, chance: float, row_s: float, rng: random.Random, ledger: DraftLedger) -> Served:
    """Draft wherever the ledger lets; a plain step takes a second, each guess `row_s` more."""
    served = Served()
    for _ in range(STEPS):
        drafts = ledger.may_draft(sequences)
        accepted = sum(rng.random() < chance for _ in range(guesses)) if drafts else 0
        step_s = 1.0 + row_s * guesses * drafts
        ledger.observe(sequences, guesses * drafts, accepted, step_s)
        served.tokens += sequences + accepted
        served.seconds += step_s
        served.drafted += drafts
    return served


@given(
    sequences=st.integers(1, 7),
    guesses=st.integers(1, 7),
    chance=st.floats(0, 1),
    row_s=st.floats(0, (MOST_RATIO - 1) / 7),
    seed=st.integers(0, 9),
)
def test_drafts_never_lose_more_than_the_allowance_and_one_step(
    sequences: int, guesses: int, chance: float, row_s: float, seed: int
) -> None:
    served = serve(sequences, guesses, chance, row_s, random.Random(seed), DraftLedger(7))
    plain_s = served.tokens / sequences
    assert served.seconds <= plain_s + ALLOWANCE * STEPS + MOST_RATIO - 1 + 1e-6


@given(sequences=st.integers(1, 7), seed=st.integers(0, 9))
def test_drafts_that_gain_go_on_but_for_a_plain_step_now_and_then(sequences: int, seed: int) -> None:
    served = serve(sequences, 1, 1.0, 0.5 / sequences, random.Random(seed), DraftLedger(7))
    assert served.drafted >= STEPS * PLAIN_EVERY / (PLAIN_EVERY + 1) - 3
    assert served.drafted < STEPS


def test_drafts_that_lose_become_rare_and_come_back_when_they_gain() -> None:
    ledger, rng = DraftLedger(7), random.Random(1)
    bad = serve(2, 4, 0.0, 0.1, rng, ledger)
    assert 1 < bad.drafted < STEPS * ALLOWANCE / 0.4 + 3
    good = serve(2, 4, 1.0, 0.1, rng, ledger)
    assert good.drafted > STEPS / 2
    worse = serve(2, 4, 0.0, 0.1, rng, ledger)
    assert worse.drafted < STEPS * ALLOWANCE / 0.4 + 9, "gains of the past pay for few steps"


def test_numbers_of_sequences_have_accounts_of_their_own() -> None:
    ledger, rng = DraftLedger(4), random.Random(1)
    assert not ledger.may_draft(0)
    assert not ledger.may_draft(5), "more sequences than can have drafts"
    assert not ledger.may_draft(1), "nothing is known of plain steps"
    serve(1, 4, 1.0, 0.0, rng, ledger)
    assert not ledger.may_draft(2)
    ledger.observe(5, 0, 0, 1.0)
    assert not ledger.may_draft(5)


def test_one_step_that_something_held_up_counts_as_a_bad_one() -> None:
    ledger = DraftLedger(1)
    for _ in range(8):
        ledger.observe(1, 0, 0, 1.0)
    ledger.observe(1, 1, 0, 1000.0)
    recovery = 0
    while not ledger.may_draft(1):
        ledger.observe(1, 0, 0, 1.0)
        recovery += 1
    assert recovery <= (MOST_RATIO - 1) / ALLOWANCE + 1
