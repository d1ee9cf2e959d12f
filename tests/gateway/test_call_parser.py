"""Calls and text come out of an answer as they are in it, whatever pieces it comes in and wherever it is cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.tools.call_format import FORMATS, HERMES, LLAMA3, MISTRAL, QWEN_CODER, CallFormat
from services.gateway.tools.call_parser import Arguments, CallBegin, CallParser, Text
from tests.support.call_formats import WRITERS, Writer, hermes, llama3, llama3_tagged, mistral, qwen_coder

TAG = HERMES.tag
# Some begin as others do.
NAMES = {name: {"t", "text"} for name in ("f", "get", "get_time", "get_weather", "x" * 64)}
# Much of what is like a call and is none.
LIKENESSES = [
    "<",
    "<tool",
    "\n",
    " ",
    "a",
    '"',
    "{",
    "}",
    "]",
    "f",
    '\n{"name": "',
    '{"name": "f", "parameters": ',
    '", "arguments": ',
    "}\n</tool_call>",
    "[TOOL",
    ' [{"name": "f", "arguments": ',
    ', "id": "a1B2c3D4e"}',
    "[CALL_ID]a1B2c3D4e",
    "[ARGS]",
    "\n<function=f>\n",
    "<parameter=t>\n",
    "<parameter=n>\n",
    "\n</parameter>\n",
    "</function>\n</tool_call>",
    "ü🎉",
]
LIKENESSES += [one.tag for one in FORMATS.values()]
VALUES = st.recursive(
    st.one_of(
        st.text(max_size=8), st.sampled_from([*LIKENESSES, '\\"', "\\"]), st.integers(), st.booleans(), st.none()
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(list(NAMES)), st.dictionaries(st.text(max_size=5), VALUES, max_size=3)), max_size=3
)
END = "\n</parameter>\n"
# Of a format whose arguments are not JSON as a whole.
TEXTS = st.one_of(st.text(max_size=8), st.lists(st.sampled_from(LIKENESSES), max_size=3).map("".join)).filter(
    lambda text: (text + END).find(END) == len(text)
)
PARAMETERS = st.fixed_dictionaries({}, optional={"t": TEXTS, "n": VALUES, "text": TEXTS, "m": VALUES})
CUTS = st.lists(st.integers(0, 300), max_size=12)
Parsed = tuple[str, list[list[str]], bool]
each_format = pytest.mark.parametrize("call_format", list(FORMATS.values()), ids=list(FORMATS))
JSON_WRITERS = [(one, write) for one, write in WRITERS if not one.has_parameters]
each_writer = pytest.mark.parametrize(
    ("call_format", "write"), JSON_WRITERS, ids=[write.__name__ for _, write in JSON_WRITERS]
)


def parse(call_format: CallFormat, text: str, cuts: list[int]) -> Parsed:
    """Text, calls and whether they are complete, of a text in pieces."""
    parser, shown, calls = CallParser(call_format, NAMES), "", []
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


def written(write: Writer, calls: list[tuple[str, Any]], indent: int | None = None) -> str:
    """Nothing for no calls."""
    return write([(n, json.dumps(v, ensure_ascii=False, indent=indent)) for n, v in calls]) if calls else ""


@each_writer
@settings(max_examples=60)
@given(text=st.text(), calls=CALLS, cuts=CUTS, indent=st.sampled_from([None, 1]))
def test_calls_are_found_in_any_pieces(
    call_format: CallFormat, write: Writer, text: str, calls: list[tuple[str, Any]], cuts: list[int], indent: Any
) -> None:
    calls = calls[:1] if call_format.is_single else calls
    # Where calls need no tag an answer begins with them.
    text = "" if write is llama3 and calls else text
    shown, found, complete = parse(call_format, text + written(write, calls, indent), cuts)
    assert shown == (text.rstrip() if calls else text)
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert complete is bool(calls)


@each_format
@settings(max_examples=150)
@given(text=st.lists(st.sampled_from(LIKENESSES), max_size=12).map("".join), cuts=CUTS)
def test_pieces_make_no_difference_and_nothing_is_lost(call_format: CallFormat, text: str, cuts: list[int]) -> None:
    shown, found, complete = parse(call_format, text, cuts)
    assert (shown, found, complete) == parse(call_format, text, [])
    if not found:
        assert shown == text
        assert not complete


@each_writer
@settings(max_examples=60)
@given(calls=CALLS.filter(bool), end=st.integers(0, 200), cuts=CUTS)
def test_what_was_said_of_a_cut_answer_is_given(
    call_format: CallFormat, write: Writer, calls: list[tuple[str, Any]], end: int, cuts: list[int]
) -> None:
    """Every character of a name or of arguments, and the beginnings of what might have become a call."""
    before = "" if write is llama3 else "so:"
    calls = calls[:1] if call_format.is_single else calls
    said = (before + written(write, calls))[:end]
    shown, found, _ = parse(call_format, said, cuts)
    held = shown.removeprefix(before[:end])
    assert said.endswith(held)
    # Nothing is held that is a call's: without it the same calls are there.
    assert found == parse(call_format, said[: len(said) - len(held)], [])[1]
    assert [(name, json.loads(arguments)) for name, arguments in found[:-1]] == calls[: max(0, len(found) - 1)]
    if not found:
        assert shown == said
        return
    # With the arguments all is accounted for but the tail of a call, and white space.
    name, value = calls[len(found) - 1]
    arguments, tail = json.dumps(value, ensure_ascii=False), written(write, [("f", {})]).partition("{}")[2]
    begin = len(before + written(write, calls[: len(found)])) - len(tail) - len(arguments)
    assert found[-1] == [name, said[begin : begin + len(arguments)]]
    lost = said[begin + len(arguments) :].removesuffix(held)
    assert len(lost.rstrip()) <= len(tail)


@settings(max_examples=150)
@given(
    text=st.text(),
    calls=st.lists(st.tuples(st.sampled_from(list(NAMES)), PARAMETERS), max_size=3),
    cuts=CUTS,
    end=st.integers(0, 300),
)
def test_parameters_become_json(text: str, calls: list[tuple[str, Any]], cuts: list[int], end: int) -> None:
    whole = text + written(qwen_coder, calls)
    shown, found, complete = parse(QWEN_CODER, whole, cuts)
    assert shown == (text.rstrip() if calls else text)
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert complete is bool(calls)
    # Of a cut answer all that was said of each value is given.
    _, cut, _ = parse(QWEN_CODER, whole[:end], cuts)
    assert cut == parse(QWEN_CODER, whole[:end], [])[1]
    assert all(one == another for one, another in zip(cut[:-1], found, strict=False))
    if cut:
        assert cut[-1][0] == found[len(cut) - 1][0]


def test_a_value_that_is_cut_is_given() -> None:
    begin = '<tool_call>\n<function=f>\n<parameter=t>\nPa"ris'
    for held in ("", "\n", "\n</param", "\n</parameter>"):
        assert parse(QWEN_CODER, begin + held, []) == ("", [["f", json.dumps({"t": f'Pa"ris{held}'})[:-2]]], False)
    assert parse(QWEN_CODER, begin + "\n</parameter>\n<par", []) == ("", [["f", '{"t": "Pa\\"ris"']], False)


@pytest.mark.parametrize(("call_format", "write"), WRITERS)
def test_functions_that_may_not_be_called_are_text(call_format: CallFormat, write: Writer) -> None:
    said = write([("other", "{}")])
    assert parse(call_format, said, []) == (said, [], False)


@pytest.mark.parametrize("end", range(len(TAG)))
def test_only_what_may_be_a_tag_waits(end: int) -> None:
    parser = CallParser(HERMES, NAMES)
    assert parser.push(f"a b{TAG[:end]}") == [Text("a b")]
    assert parser.push("x") == [Text(f"{TAG[:end]}x")]
    assert parser.push(" ") == []
    assert parser.finish() == [Text(" ")]


def test_an_answer_without_a_tag_waits_while_it_may_be_a_call() -> None:
    parser = CallParser(LLAMA3, NAMES)
    assert parser.push('{"name": "John') == [Text('{"name": "John')]
    assert parser.push(llama3([("f", "{}")])) == [Text(llama3([("f", "{}")]))]
    assert [type(piece) for piece in parser.push(llama3_tagged([("f", "{}")]))] == [CallBegin, Arguments]


def test_a_tag_behind_what_was_no_call_is_one() -> None:
    shown, found, complete = parse(MISTRAL, "[TOOL_CALLS] [" + mistral([("f", "{}")]), [])
    assert (shown, found, complete) == ("[TOOL_CALLS] [", [["f", "{}"]], True)


def test_arguments_are_given_as_they_come() -> None:
    parser = CallParser(HERMES, NAMES)
    assert parser.push(f'{TAG}\n{{"name": "f", "arguments":') == []
    assert parser.push(' {"a"') == [CallBegin(0, "f"), Arguments(0, '{"a"')]
    assert parser.push(": 1") == [Arguments(0, ": 1")]
    assert not parser.all_complete
    assert parser.push("}}\n</tool_call>") == [Arguments(0, "}")]
    assert parser.all_complete
    assert parser.finish() == []
    assert parse(HERMES, hermes([("f", "{}")]), []) == ("", [["f", "{}"]], True)
