"""The grammar that holds an answer to the functions it may call, in the format of its model. Pure.

A function's arguments are of its schema whether it is `strict` or not. What the model writes before its first call is
free, unless it has to call; after a call there are only more calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from services.common.grammars import inline_schema, lark_grammar
from services.gateway.errors import InvalidRequest
from services.gateway.grammars.formats import json_form
from services.gateway.request import AnswerForm, Function, ToolUse
from services.gateway.tools.call_format import ANY, CallFormat
from services.gateway.tools.parameters import BEGIN, END, NAMED, is_text

MAX_TOOLS = 128
# A model that repeats itself ends after so many.
MAX_CALLS = 16
# A schema with one of these says elsewhere which properties there are.
_COMBINING = {"additionalProperties", "unevaluatedProperties", "patternProperties", "$ref", "$dynamicRef"} | {
    "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas",
}  # fmt: skip
_PATTERN_CHARACTERS = re.compile(r"[\\^$.|?*+()\[\]{}/]")
# What else bears on an object as a whole.
_OF_OBJECTS = _COMBINING - {"additionalProperties"} | {
    "const", "enum", "minProperties", "maxProperties", "propertyNames", "then", "else", "dependencies",
    "dependentRequired", "$recursiveRef",
}  # fmt: skip
# Where the values of a schema's keyword are schemas by names, and where they are none.
_BY_NAME = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
_NO_SCHEMAS = {"const", "enum", "default", "example", "examples"}
_KEPT = ("#/$defs/", "#/definitions/")
# In the name of an argument that is written in a tag.
_UNWRITABLE = re.compile(r"[>\n]")
_ANYTHING = r"/(.|\n)*/"


def tool_form(use: ToolUse, call_format: CallFormat, control: Mapping[str, int]) -> AnswerForm:
    """What answers have to match, and the parts to look for an error in. Raises InvalidRequest.

    control: those parts of the format's texts that are control tokens of the model, with their ids.
    """
    closed = [msgspec.structs.replace(function, parameters=_closed(function.parameters)) for function in use.functions]
    # First, since it refuses what is nested too deeply to be written.
    parts = tuple(json_form(function.field, function.parameters) for function in closed)
    rules = _Rules(closed, use, call_format, control)
    return AnswerForm(lark_grammar("\n".join(rules.lines())), use.field, parts)


def _is_said_by_properties(schema: Mapping[str, Any]) -> bool:
    """Whether a schema's properties tell all arguments, with names that can be written in a tag."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if _OF_OBJECTS & schema.keys() or not isinstance(properties, Mapping):
        return False
    are_named = isinstance(required, list) and all(name in properties for name in required if isinstance(name, str))
    return are_named and not any(map(_UNWRITABLE.search, properties))


def _refers_to_definitions_alone(schema: Any) -> bool:
    """Whether every reference in a schema is to its `$defs` or `definitions`, which each argument's schema has too."""
    left = [schema]
    while left:
        one = left.pop()
        if isinstance(one, list):
            left += one
        if not isinstance(one, Mapping):
            continue
        reference = one.get("$ref", _KEPT[0])
        if isinstance(reference, str) and not reference.startswith(_KEPT):
            return False
        for keyword, value in one.items():
            if keyword in _BY_NAME and isinstance(value, Mapping):
                left += value.values()
            elif keyword not in _NO_SCHEMAS:
                left.append(value)
    return True


def _value(schema: Any, definitions: Mapping[str, Any]) -> str:
    """A value and its end. definitions: that the schema may refer to."""
    if is_text(schema):
        texts = " | ".join(json.dumps(text + END) for text in schema.get("enum", ()))
        return f"({texts})" if texts else "text"
    whole = dict(schema) if isinstance(schema, Mapping) else {} if schema else {"not": {}}
    return f"{inline_schema({**definitions, **whole})} {json.dumps(END)}"


def _closed(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments that a schema does not name are none, unless it says otherwise: functions seldom take them."""
    closed = {"type": "object", **parameters}
    return closed if _COMBINING & closed.keys() else {**closed, "additionalProperties": False}


def _literal(text: str) -> str:
    """A text in a regular expression of Lark's notation."""
    return _PATTERN_CHARACTERS.sub(r"\\\g<0>", text)


class _Rules:
    """The rules of one grammar in Lark's notation."""

    def __init__(
        self, functions: Sequence[Function], use: ToolUse, call_format: CallFormat, control: Mapping[str, int]
    ) -> None:
        self._functions = functions
        self._must_call = use.must_call
        self._most_calls = 1 if call_format.is_single else use.most_calls
        self._format = call_format
        self._control = control

    def lines(self) -> Iterator[str]:
        """Every rule and terminal."""
        tag = self._format.tag
        if self._must_call:
            begin = f"({self._text(tag)})?" if self._format.tag_is_optional else self._text(tag)
            yield f"start: {begin} calls"
        else:
            bare = " | calls" if self._format.tag_is_optional else ""
            yield f"start: TEXT | until_tag calls{bare}"
            # Lazy: text that has come to the tag is no text any more. A control token ends text anyway.
            yield f"until_tag{'' if tag in self._control else '[lazy]'}: TEXT {self._text(tag)}"
            yield f"TEXT: {_ANYTHING}{self._no_spelled_tag()}{self._no_bare_call()}"
        yield f"calls: {self._any_of(self._format.begin)} call {self._further()} {self._text(self._format.end)}"
        yield f"call: {' | '.join(f'call_{i}' for i in range(len(self._functions)))}"
        if self._format.has_parameters:
            # Lazy: a value that has come to its end is complete.
            yield f"text[lazy]: ANYTHING {json.dumps(END)}"
            yield f"ANYTHING: {_ANYTHING}"
        after = self._any_of(self._format.after_arguments)
        for i, function in enumerate(self._functions):
            # Each in one piece: of pieces the first would end where text that begins so goes on.
            heads = self._any_of([head for head, _ in self._format.next_heads([function.name])])
            yield f"call_{i}: {heads} {self._arguments(function)} {after}"

    def _arguments(self, function: Function) -> str:
        if self._format.has_parameters:
            return " ".join(self._parameters(function))
        return inline_schema(function.parameters)

    def _parameters(self, function: Function) -> Iterator[str]:
        """One part for each argument, in the order of the schema. Raises InvalidRequest."""
        schema = function.parameters
        if not _is_said_by_properties(schema):
            detail = "the model writes arguments one by one, so `properties` alone has to say which there are"
            raise InvalidRequest(f"{function.field}: {detail}", function.field)
        if not _refers_to_definitions_alone(schema):
            detail = "the model writes arguments one by one, so a $ref begins with #/$defs/ or #/definitions/"
            raise InvalidRequest(f"{function.field}: {detail}", function.field)
        definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        for name, own in schema.get("properties", {}).items():
            part = f"{json.dumps(BEGIN + name + NAMED)} {_value(own, definitions)}"
            yield part if name in schema.get("required", []) else f"({part})?"

    def _further(self) -> str:
        further = self._most_calls - 1
        again = "" if self._format.end else self._format.tag
        begin = "" if self._format.end else self._any_of(self._format.begin)
        return f"({self._text(self._format.between + again)} {begin} call){{0,{further}}}" if further else ""

    def _no_spelled_tag(self) -> str:
        """Text does not spell a tag that is a control token: it would be read as one."""
        tag = self._format.tag
        return rf" & ~/(.|\n)*{_literal(tag)}(.|\n)*/" if tag in self._control else ""

    def _no_bare_call(self) -> str:
        """Text does not begin as a call of one of the functions does, nor so behind the space that some models add."""
        if not self._format.tag_is_optional:
            return ""
        heads = "|".join(
            _literal(f"{begin}{before}{function.name}")
            for begin in self._format.begin
            for before in self._format.before_name
            for function in self._functions
        )
        return rf" & ~/ ?({heads})\"(.|\n)*/"

    def _any_of(self, texts: Sequence[str]) -> str:
        written = [self._text(text) for text in texts if text]
        if not written:
            return ""
        return f"({' | '.join(written)}){'?' if len(written) < len(texts) else ''}"

    def _text(self, text: str) -> str:
        """A text of the format: what is text in it, the control tokens, and letters and digits of an id."""
        special = [re.escape(token) for token in self._control] + [f"{ANY}+"]
        parts = re.split(f"({'|'.join(special)})", text)
        return " ".join(self._part(part) for part in parts if part)

    def _part(self, part: str) -> str:
        if part in self._control:
            return f"<[{self._control[part]}]>"
        return f"/[A-Za-z0-9]{{{len(part)}}}/" if part[0] == ANY else json.dumps(part)
