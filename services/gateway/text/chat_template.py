"""The model's own chat template, in jinja2's sandbox, safe against control tokens typed by a user.

A special token that occurs inside a message must not become a control token. Before rendering, every special token's
text in messages and tools gets a guard character after its first one; what then looks like a special token in the
rendered text is the template's own. `Rendered.pieces` gives those apart from plain text, guards removed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.common.settings import ConfigurationError
from services.gateway.errors import InvalidRequest
from services.gateway.text.tool_prompt import as_text, calls_of, with_objects

_GUARDS = range(0x10F000, 0x10FFFE)
_MAX_GROWTH = 8
_MAX_SLACK_CHARACTERS = 1 << 20


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter that templates of published models expect."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.filters["tojson"] = _to_json
    return environment


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered chat. Parts of `text` that match `special` are control tokens, `guard` is to be dropped."""

    text: str
    guard: str
    special: re.Pattern[str] | None

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """Runs of text in order, each with whether it is one special token."""
        position = 0
        for match in self.special.finditer(self.text) if self.special is not None else ():
            if match.start() > position:
                yield self.text[position : match.start()].replace(self.guard, ""), False
            yield match[0], True
            position = match.end()
        if position < len(self.text):
            yield self.text[position:].replace(self.guard, ""), False


class ChatTemplate:
    """A compiled template with the model's special tokens. calls: how calls are written, and who tells of tools."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Sequence[str],
        variables: Mapping[str, str],
        call_format: str | None = None,
        is_for_tools: bool = False,
    ) -> None:
        """variables: what templates expect beside the messages, such as bos_token. call_format: as it is set.

        is_for_tools: it takes tools for granted, so where there are none it is given an empty list.
        Raises ConfigurationError.
        """
        try:
            self._template = _environment().from_string(source)
            self.calls = calls_of(source, _environment(), call_format)
        except jinja2.TemplateError as error:
            raise ConfigurationError(f"chat template: {error}") from None
        self._variables = dict(variables)
        self._no_tools: list[Any] | None = [] if is_for_tools else None
        longest_first = sorted((token for token in special_tokens if token), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> Rendered:
        """The chat up to where the assistant's answer begins. Raises InvalidRequest when the template refuses it."""
        try:
            calls = self.calls
            given = with_objects(messages, calls.format) if calls.is_native else as_text(messages, tools, calls.format)
            guard = _unused_character([given, tools])
            return self._render(self._guarded(given, guard), self._guarded(tools, guard), guard)
        except RecursionError:
            raise InvalidRequest("the messages or the tools are nested too deeply", "messages") from None

    def _render(self, messages: list[Any], tools: list[Any], guard: str) -> Rendered:
        """Both with their special tokens guarded."""
        size = sum(map(len, strings_of([messages, tools])))
        limit = _MAX_GROWTH * size + _MAX_SLACK_CHARACTERS
        parts: list[str] = []
        try:
            for part in self._template.generate(
                messages=messages,
                add_generation_prompt=True,
                tools=(tools or self._no_tools) if self.calls.is_native else None,
                documents=None,
                **self._variables,
            ):
                parts.append(part)
                limit -= len(part)
                if limit < 0:
                    raise InvalidRequest("the chat template's output is too long", "messages")
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}", "messages") from None
        except (TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise InvalidRequest(
                f"the model's chat template cannot render these messages: {type(error).__name__}", "messages"
            ) from None
        text = "".join(parts)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(
                "the messages have half of a surrogate pair, which is no character", "messages"
            ) from None
        return Rendered(text, guard, self._special)

    def _guarded(self, value: Any, guard: str) -> Any:
        """A value with the guard in every special token of its texts."""
        if self._special is None:
            return value
        if isinstance(value, str):
            return self._special.sub(lambda match: match[0][0] + guard + match[0][1:], value)
        if isinstance(value, Mapping):
            return {self._guarded(key, guard): self._guarded(item, guard) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self._guarded(item, guard) for item in value]
        return value


def strings_of(value: Any) -> Iterator[str]:
    """All texts in a value, the names of its fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from strings_of(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from strings_of(item)


def _unused_character(value: Any) -> str:
    first = chr(_GUARDS[0])
    if not any(first in text for text in strings_of(value)):
        return first
    used: set[str] = set().union(*strings_of(value))
    for number in _GUARDS:
        if chr(number) not in used:
            return chr(number)
    raise InvalidRequest("the messages use every private character", "messages")
