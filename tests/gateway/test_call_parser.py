"""Calls and text come out of an answer as they are in it, whatever pieces it comes in and wherever it is cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.tools.call_format import AFTER_ARGUMENTS, TAG, call_text
from services.gateway.tools.call_parser import Arguments, CallBegin, CallParser, Text

# Much of what is like a call and is none.
LIKENESSES = [
    "<",
    "<tool",
    TAG,
    "\n",
    " ",
    "a",
    '"',
    "{",
    "}",
    '\n{"name": "',
    '", "arguments": ',
    AFTER_ARGUMENTS,
    "ü🎉",
]
VALUES = st.recursive(
    st.one_of(
        st.text(max_size=8), st.sampled_from([*LIKENESSES, '\\"', "\\"]), st.integers(), st.booleans(), st.none()
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
CALLS = st.lists(
    st.tuples(
        st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True), st.dictionaries(st.text(max_size=5), VALUES, max_size=3)
    ),
    max_size=3,
)
CUTS = st.lists(st.integers(0, 300), max_size=12)
Parsed = tuple[str, list[list[str]], bool]


def parse(text: str, cuts: list[int]) -> Parsed:
    """Text, calls and whether they are complete, of a text in pieces."""
    parser, shown, calls = CallParser(), "", []
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [piece for a, b in itertools.pairwise(borders) for piece in parser.push(text[a:b])]
    for piece in [*pieces, *parser.finish()]:
        match piece:
            case Text(more):
                shown += more
            case CallBegin(index, name):
                assert index == len(calls)
                calls.append([name, ""])
            case Arguments(index, more):
                assert index == len(calls) - 1
                calls[index][1] += more
    return shown, calls, parser.all_complete


def written(calls: list[tuple[str, Any]], indent: int | None) -> list[str]:
    return [call_text(name, json.dumps(value, ensure_ascii=False, indent=indent)) for name, value in calls]


@settings(max_examples=100)
@given(text=st.text().filter(lambda text: TAG not in text), calls=CALLS, cuts=CUTS, indent=st.sampled_from([None, 1]))
def test_calls_are_found_in_any_pieces(text: str, calls: list[tuple[str, Any]], cuts: list[int], indent: Any) -> None:
    shown, found, complete = parse(text + "\n".join(written(calls, indent)), cuts)
    assert shown == (text.rstrip() if calls else text)
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert complete is bool(calls)


@settings(max_examples=200)
@given(text=st.lists(st.sampled_from(LIKENESSES), max_size=12).map("".join), cuts=CUTS)
def test_pieces_make_no_difference_and_nothing_is_lost(text: str, cuts: list[int]) -> None:
    shown, found, complete = parse(text, cuts)
    assert (shown, found, complete) == parse(text, [])
    if not found:
        assert shown == text
        assert not complete


@settings(max_examples=100)
@given(calls=CALLS.filter(bool), end=st.integers(0, 200), cuts=CUTS)
def test_what_was_said_of_a_cut_answer_is_given(calls: list[tuple[str, Any]], end: int, cuts: list[int]) -> None:
    """Every character of a name or of arguments, and the beginnings of what might have become a call."""
    said = ("so:\n" + "\n".join(written(calls, None)))[:end]
    shown, found, _ = parse(said, cuts)
    held = shown.removeprefix("so:"[:end])
    assert said.endswith(held)
    # Nothing is held that is a call's: behind a tag is no `{` of arguments yet.
    assert TAG not in held or found == parse(said[: len(said) - len(held)], [])[1]
    assert [(name, json.loads(arguments)) for name, arguments in found[:-1]] == calls[: max(0, len(found) - 1)]
    if found:
        name, value = calls[len(found) - 1]
        assert found[-1][0] == name
        assert json.dumps(value, ensure_ascii=False).startswith(found[-1][1])


@pytest.mark.parametrize("end", range(len(TAG)))
def test_only_what_may_be_a_tag_waits(end: int) -> None:
    parser = CallParser()
    assert parser.push(f"a b{TAG[:end]}") == [Text("a b")]
    assert parser.push("x") == [Text(f"{TAG[:end]}x")]
    assert parser.push(" ") == []
    assert parser.finish() == [Text(" ")]


def test_arguments_are_given_as_they_come() -> None:
    parser = CallParser()
    assert parser.push(f'{TAG}\n{{"name": "f", "arguments":') == []
    assert parser.push(' {"a"') == [CallBegin(0, "f"), Arguments(0, '{"a"')]
    assert parser.push(": 1") == [Arguments(0, ": 1")]
    assert not parser.all_complete
    assert parser.push("}" + AFTER_ARGUMENTS) == [Arguments(0, "}")]
    assert parser.all_complete
    assert parser.finish() == []
