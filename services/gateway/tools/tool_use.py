"""Which functions an answer may call and how often, and the grammar that holds it to that. Pure.

A function's arguments are of its schema whether it is `strict` or not. What the model writes before its first call is
free, unless it has to call; after a call there are only more calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from services.common.grammars import inline_schema, lark_grammar
from services.gateway.grammars.formats import json_form
from services.gateway.request import AnswerForm
from services.gateway.tools.call_format import (
    AFTER_ARGUMENTS,
    BEFORE_ARGUMENTS,
    BEFORE_NAME,
    BETWEEN_CALLS,
    TAG,
)

MAX_TOOLS = 128
# A model that repeats itself ends after so many.
MAX_CALLS = 16
# A schema with one of these says elsewhere which properties there are.
_COMBINING = {"additionalProperties", "unevaluatedProperties", "patternProperties", "$ref", "$dynamicRef"} | {
    "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas",
}  # fmt: skip


class Function(msgspec.Struct, frozen=True):
    """A function that may be called. parameters: the schema of its arguments, an object's. field: for messages."""

    name: str
    parameters: Mapping[str, Any]
    field: str


class ToolUse(msgspec.Struct, frozen=True):
    """functions: those that may be called. must_call: no answer without a call. most_calls: in one answer."""

    functions: Sequence[Function]
    must_call: bool
    most_calls: int


def tool_form(use: ToolUse) -> AnswerForm:
    """What answers have to match, and the parts to look for an error in. Raises InvalidRequest."""
    closed = [msgspec.structs.replace(function, parameters=_closed(function.parameters)) for function in use.functions]
    # First, since it refuses what is nested too deeply to be written.
    parts = tuple(json_form(function.field, function.parameters) for function in closed)
    return AnswerForm(lark_grammar("\n".join(_rules(closed, use))), "tools", parts)


def _closed(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments that a schema does not name are none, unless it says otherwise: functions seldom take them."""
    closed = {"type": "object", **parameters}
    return closed if _COMBINING & closed.keys() else {**closed, "additionalProperties": False}


def _rules(functions: Sequence[Function], use: ToolUse) -> Iterator[str]:
    after_tag = f"call {_quoted(AFTER_ARGUMENTS)}"
    further = use.most_calls - 1
    more = f"({_quoted(BETWEEN_CALLS + TAG)} {after_tag}){{0,{further}}}" if further else ""
    if use.must_call:
        yield f"start: {_quoted(TAG)} {after_tag} {more}"
    else:
        yield f"start: TEXT | until_tag {after_tag} {more}"
        # Lazy: text that has come to the tag is no text any more.
        yield f"until_tag[lazy]: TEXT {_quoted(TAG)}"
        yield r"TEXT: /(.|\n)*/"
    yield f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}"
    for i, function in enumerate(functions):
        begin = _quoted(f"{BEFORE_NAME}{function.name}{BEFORE_ARGUMENTS}")
        yield f"call_{i}: {begin} {inline_schema(function.parameters)}"


def _quoted(text: str) -> str:
    return json.dumps(text)
