"""Arguments as Qwen's coders write them: each between tags of its own, text as it is and all else as JSON. Pure.

<parameter=city>
Paris
</parameter>
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

BEGIN, NAMED, END = "<parameter=", ">\n", "\n</parameter>\n"
# Text that keeps to one of these is written as JSON, which grammars can hold to it.
_BOUNDS = {"const", "pattern", "format", "minLength", "maxLength", "allOf", "anyOf", "oneOf", "not", "if", "$ref"}

_DECODER = json.JSONDecoder()
_OPENED, _COLON, _COMMA = re.compile(r"\s*\{\s*"), re.compile(r"\s*:\s*"), re.compile(r"\s*,\s*")


def is_text(schema: Any) -> bool:
    """Whether values of a schema are written as they are: any text, or one of several."""
    if not isinstance(schema, Mapping) or schema.get("type") != "string" or _BOUNDS & schema.keys():
        return False
    choices = schema.get("enum", [""])
    return isinstance(choices, list) and bool(choices) and all(isinstance(choice, str) for choice in choices)


def text_parameters(parameters: Mapping[str, Any]) -> frozenset[str]:
    """Names of a function's arguments whose values are text. parameters: its schema."""
    properties = parameters.get("properties")
    known = properties.items() if isinstance(properties, Mapping) else ()
    return frozenset(name for name, schema in known if is_text(schema))


def whole_arguments(arguments: str) -> dict[str, Any]:
    """What a JSON object holds; of one that was cut the values that are whole, of anything else nothing."""
    try:
        given = json.loads(arguments)
    except ValueError:
        return _whole_fields(arguments)
    return given if isinstance(given, dict) else {}


def _whole_fields(cut: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    at = _OPENED.match(cut)
    while at is not None:
        try:
            name, end = _DECODER.raw_decode(cut, at.end())
            colon = _COLON.match(cut, end)
            if colon is None or not isinstance(name, str):
                break
            value, end = _DECODER.raw_decode(cut, colon.end())
        except ValueError:
            break
        # Behind a number alone there may have been more of it.
        at = _COMMA.match(cut, end)
        if at is not None or not isinstance(value, int | float) or isinstance(value, bool):
            fields[name] = value
    return fields


def parameters_text(arguments: str) -> str:
    """A JSON object as a call has it; see `whole_arguments`."""
    return "".join(
        f"{BEGIN}{name}{NAMED}{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}{END}"
        for name, value in whole_arguments(arguments).items()
    )


class ParameterReader:
    """From the parameters of one call to a JSON object, as they come."""

    __slots__ = ("_held", "_in_value", "_is_text", "_num_begun", "_texts")

    def __init__(self, texts: Collection[str]) -> None:
        """texts: names of the arguments whose values are text."""
        self._texts = texts
        self._num_begun = 0
        # In a value: what may be the beginning of its end. Between values: of a tag.
        self._held = ""
        self._in_value = False
        self._is_text = False

    def push(self, text: str) -> tuple[str, str | None]:
        """More of the object, and what follows it once it is complete."""
        self._held += text
        told: list[str] = []
        while True:
            if self._in_value:
                told.append(self._value())
                if self._in_value:
                    return "".join(told), None
            elif BEGIN.startswith(self._held[: len(BEGIN)]):
                named = self._begin()
                if not named:
                    return "".join(told), None
                told.append(named)
            else:
                told.append("}" if self._num_begun else "{}")
                return "".join(told), self._held

    def finish(self) -> str:
        """What was held back of a value that was cut."""
        return self._written(self._held) if self._in_value else ""

    def _begin(self) -> str:
        """All before a value, or nothing while its name is not complete."""
        name, ends, rest = self._held[len(BEGIN) :].partition(NAMED)
        if not ends:
            return ""
        self._held, self._in_value, self._is_text = rest, True, name in self._texts
        self._num_begun += 1
        before = "{" if self._num_begun == 1 else ", "
        return f"{before}{json.dumps(name, ensure_ascii=False)}: {_quote(self._is_text)}"

    def _value(self) -> str:
        """What is known of a value; it may end."""
        value, ends, rest = self._held.partition(END)
        if ends:
            self._held, self._in_value = rest, False
            return self._written(value) + _quote(self._is_text)
        kept = next((length for length in range(len(END) - 1, 0, -1) if value.endswith(END[:length])), 0)
        self._held = value[len(value) - kept :]
        return self._written(value[: len(value) - kept])

    def _written(self, value: str) -> str:
        return json.dumps(value, ensure_ascii=False)[1:-1] if self._is_text else value


def _quote(is_text: bool) -> str:
    return '"' if is_text else ""
