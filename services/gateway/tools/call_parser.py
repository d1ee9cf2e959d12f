"""From the text of an answer to its calls, as it comes. Pure; what comes out does not depend on the pieces that go in.

Text is given at once, but for white space at its end and what may be the beginning of a tag: they wait until they are
known to be text. A call is given with its name when its arguments begin, and these as they come. White space before a
tag is dropped. Whatever is not written as the call format has it, or calls another function, is text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from services.gateway.tools.call_format import ANY, CallFormat
from services.gateway.tools.parameters import ParameterReader


@dataclass(frozen=True, slots=True)
class Text:
    """Text beside the calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of the function `name`, the index-th of the answer."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the arguments of a call, as JSON."""

    index: int
    text: str


Piece = Text | CallBegin | Arguments


@dataclass(slots=True)
class _Nesting:
    """How deep in a JSON value a text is."""

    depth: int = 0
    in_string: bool = False
    escaped: bool = False

    def ends_with(self, character: str) -> bool:
        """Take one more; whether the value is complete with it."""
        if self.in_string:
            if self.escaped:
                self.escaped = False
            elif character == "\\":
                self.escaped = True
            elif character == '"':
                self.in_string = False
            return False
        if character == '"':
            self.in_string = True
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            self.depth -= 1
        return self.depth == 0


class CallParser:
    """State of one answer. num_calls: that have begun."""

    __slots__ = (
        "_format", "_head_at", "_heads", "_held", "_names", "_nesting", "_pieces", "_reader", "_state", "_tails",
        "num_calls",
    )  # fmt: skip

    def __init__(self, call_format: CallFormat, names: Mapping[str, Collection[str]]) -> None:
        """names: of the functions that may be called, each with the names of its arguments that are text."""
        self.num_calls = 0
        self._format = call_format
        self._names = names
        # In text: what may be a tag. In a head: all from the white space before its tag. In a tail: its beginning.
        self._held = ""
        # Where in it a head begins, and which it may become.
        self._head_at = 0
        self._heads: list[tuple[str, str]] = []
        self._tails: list[tuple[str, bool]] = []
        self._nesting = _Nesting()
        self._reader = ParameterReader(())
        self._pieces: list[Piece] = []
        # Takes text and gives back what of it is for the next state.
        self._state: Callable[[str], str] = self._in_text
        if call_format.tag_is_optional:
            self._expect_head(call_format.heads(list(names)))

    def push(self, text: str) -> list[Piece]:
        """What is known of the answer with this text."""
        while text:
            text = self._state(text)
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """What was held back, when the answer has ended."""
        if self._state == self._in_parameters:
            cut = self._reader.finish()
            return [Arguments(self.num_calls - 1, cut)] if cut else []
        held, self._held = self._held, ""
        is_of_a_call = self._state == self._in_tail or (self.num_calls and not held.strip())
        return [Text(held)] if held and not is_of_a_call else []

    @property
    def all_complete(self) -> bool:
        """Whether there are calls, none of them cut."""
        return self.num_calls > 0 and self._state == self._in_text

    def _in_text(self, text: str) -> str:
        whole, tag = self._held + text, self._format.tag
        found = whole.find(tag)
        if found >= 0:
            begin = len(whole[:found].rstrip())
            self._show(whole[:begin])
            self._held = whole[begin : found + len(tag)]
            self._expect_head(self._format.heads(list(self._names)))
            return whole[found + len(tag) :]
        tag_at = len(whole) - _length_of_beginning(whole, tag)
        begin = len(whole[:tag_at].rstrip())
        self._show(whole[:begin])
        self._held = whole[begin:]
        return ""

    def _expect_head(self, heads: list[tuple[str, str]]) -> None:
        self._head_at, self._heads = len(self._held), heads
        self._state = self._in_head

    def _in_head(self, text: str) -> str:
        """A call begins where its arguments do."""
        for position, character in enumerate(text):
            length = len(self._held) - self._head_at
            name = next((name for head, name in self._heads if len(head) == length), None)
            if name is not None and (character == "{" or self._format.has_parameters):
                self._begin_call(name)
                return text[position:]
            self._heads = [one for one in self._heads if _goes_on(one[0], length, character)]
            if not self._heads:
                shown, rest = self._held[: self._head_at], self._held[self._head_at :] + text[position:]
                self._show(shown)
                self._held = ""
                self._state = self._in_text
                return rest
            self._held += character
        return ""

    def _begin_call(self, name: str) -> None:
        self._pieces.append(CallBegin(self.num_calls, name))
        self.num_calls += 1
        self._held = ""
        self._nesting, self._reader = _Nesting(), ParameterReader(self._names[name])
        self._state = self._in_parameters if self._format.has_parameters else self._in_arguments

    def _in_parameters(self, text: str) -> str:
        told, rest = self._reader.push(text)
        if told:
            self._pieces.append(Arguments(self.num_calls - 1, told))
        if rest is None:
            return ""
        self._expect_tail()
        return rest

    def _expect_tail(self) -> None:
        self._tails = self._format.tails()
        self._state = self._in_text if ("", False) in self._tails else self._in_tail

    def _in_arguments(self, text: str) -> str:
        for position, character in enumerate(text):
            if self._nesting.ends_with(character):
                self._pieces.append(Arguments(self.num_calls - 1, text[: position + 1]))
                self._expect_tail()
                return text[position + 1 :]
        self._pieces.append(Arguments(self.num_calls - 1, text))
        return ""

    def _in_tail(self, text: str) -> str:
        for position, character in enumerate(text):
            self._tails = [one for one in self._tails if _goes_on(one[0], len(self._held), character)]
            if not self._tails:
                self._state = self._in_text
                rest, self._held = self._held + text[position:], ""
                return rest
            self._held += character
            another = next((another for tail, another in self._tails if len(tail) == len(self._held)), None)
            if another is not None:
                self._held = ""
                self._state = self._in_text
                if another:
                    self._expect_head(self._format.next_heads(list(self._names)))
                return text[position + 1 :]
        return ""

    def _show(self, text: str) -> None:
        if text:
            self._pieces.append(Text(text))


def _length_of_beginning(text: str, tag: str) -> int:
    """Of the longest end of a text that a tag begins with."""
    return next((length for length in range(len(tag) - 1, 0, -1) if text.endswith(tag[:length])), 0)


def _goes_on(expected: str, length: int, character: str) -> bool:
    """Whether a character is the one that a text of a format has behind its first `length`."""
    if length >= len(expected):
        return False
    wanted = expected[length]
    return character == wanted or (wanted == ANY and character.isascii() and character.isalnum())
