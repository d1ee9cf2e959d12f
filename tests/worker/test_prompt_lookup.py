"""The index of a text against a search through it, and how drafts follow what becomes of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.worker.draft_pace import DraftPace
from services.worker.prompt_lookup import PromptLookup

_texts = st.lists(st.integers(0, 3) | st.integers(0, 49_151), min_size=1, max_size=120)


def array(tokens: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.array(tokens, dtype=np.int32)


def continues_a_match(text: list[int], proposed: list[int]) -> bool:
    """Whether `proposed` follows, at some earlier place, what the text ends with."""
    whole = text + proposed
    return any(
        text[place - 2 : place] == text[-2:] and all(whole[place + i] == token for i, token in enumerate(proposed))
        for place in range(2, len(text))
    )


@given(text=_texts, most=st.integers(1, 9), data=st.data())
def test_what_is_proposed_has_followed_the_latest_tokens_before(
    text: list[int], most: int, data: st.DataObject
) -> None:
    lookup, tokens = PromptLookup(len(text)), array(text)
    known = 0
    while known < len(text):
        known = data.draw(st.integers(known + 1, len(text)))
        proposed = lookup.propose(tokens, known, most).tolist()
        assert not proposed or (len(proposed) == most and continues_a_match(text[:known], proposed))


@given(text=_texts, most=st.integers(1, 9))
def test_it_does_not_matter_in_how_many_parts_a_text_has_come(text: list[int], most: int) -> None:
    """Few n-grams are entered one by one, many at once."""
    tokens, growing, whole = array(text), PromptLookup(len(text)), PromptLookup(len(text))
    for known in range(1, len(text)):
        growing.propose(tokens, known, most)
    assert growing.propose(tokens, len(text), most).tolist() == whole.propose(tokens, len(text), most).tolist()


@given(period=st.lists(st.integers(0, 49_151), min_size=1, max_size=12, unique=True), times=st.integers(3, 9))
def test_a_text_that_repeats_itself_is_foretold(period: list[int], times: int) -> None:
    text = period * times
    start = 2 * len(period) + 4
    lookup, tokens = PromptLookup(4096), array(text)
    for known in range(start, len(text)):
        expected = (period * (times + 9))[known : known + 8]
        assert lookup.propose(tokens, known, 8).tolist() == expected


def test_memory_is_bounded_and_long_texts_are_still_searched() -> None:
    text = np.random.default_rng(1).integers(0, 49_152, 200_000).astype(np.int32)
    text[-300:] = text[-1300:-1000]
    lookup = PromptLookup(len(text))
    assert lookup.num_bytes <= 2 * 4 * 2**14
    assert lookup.propose(text, len(text) - 100, 8).tolist() == text[-100:-92].tolist()


def run(pace: DraftPace, held: list[bool], start: int = 0) -> tuple[int, int, int]:
    """Follow a text from `start` on whose guesses hold or not, each where it stands; steps, drafts and guesses made."""
    position = steps = drafts = guesses = 0
    while position < len(held):
        drafted = min(8, pace.length(start + position, 0.05), len(held) - position)
        accepted = next((i for i in range(drafted) if not held[position + i]), drafted)
        position += accepted + 1
        if drafted:
            pace.observe(drafted, accepted, start + position)
            drafts, guesses = drafts + 1, guesses + drafted
        steps += 1
    return steps, drafts, guesses


def test_where_guesses_hold_drafts_are_long() -> None:
    steps, _, _ = run(DraftPace(), [True] * 900)
    assert steps <= 104, "nearly nine tokens a step"


def test_where_none_holds_there_are_few() -> None:
    _, drafts, guesses = run(DraftPace(), [False] * 1000)
    assert drafts <= 24
    assert guesses <= 30


def test_a_text_that_begins_to_repeat_is_drafted_again_soon() -> None:
    pace = DraftPace()
    run(pace, [False] * 1000)
    steps, _, _ = run(pace, [True] * 900, start=1000)
    assert steps <= 64 + 110


@given(drafts=st.lists(st.tuples(st.integers(1, 16), st.integers(0, 16)), max_size=60), least=st.floats(1e-3, 1.0))
def test_a_pace_is_never_senseless(drafts: list[tuple[int, int]], least: float) -> None:
    pace = DraftPace()
    for position, (drafted, accepted) in enumerate(drafts, 1):
        assert pace.length(position, least) >= 0
        pace.observe(drafted, min(drafted, accepted), position)
        assert 0 < pace.chance < 1
