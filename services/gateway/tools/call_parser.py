"""From the text of an answer to its calls, as it comes. Pure; what comes out does not depend on the pieces that go in.

Text is given at once, but for white space at its end and what may be the beginning of a tag: they wait until they are
known to be text. A call is given with its name when its arguments begin, and these as they come. White space before a
tag is dropped. Whatever is not written as `call_format` has it is text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.gateway.tools.call_format import AFTER_ARGUMENTS, BEFORE_ARGUMENTS, BEFORE_NAME, NAME, TAG


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

    __slots__ = ("_held", "_name_at", "_nesting", "_pieces", "_state", "_tag_at", "num_calls")

    def __init__(self) -> None:
        self.num_calls = 0
        # In text: what may be a tag. Behind a tag: all from the white space before it. Behind arguments: what follows.
        self._held = ""
        self._tag_at = 0
        self._name_at = 0
        self._nesting = _Nesting()
        self._pieces: list[Piece] = []
        # Takes text and gives back what of it is for the next state.
        self._state: Callable[[str], str] = self._in_text

    def push(self, text: str) -> list[Piece]:
        """What is known of the answer with this text."""
        while text:
            text = self._state(text)
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """What was held back, when the answer has ended."""
        held, self._held = self._held, ""
        is_of_a_call = self._state == self._behind_arguments or (self.num_calls and not held.strip())
        return [Text(held)] if held and not is_of_a_call else []

    @property
    def all_complete(self) -> bool:
        """Whether there are calls, none of them cut."""
        return self.num_calls > 0 and self._state == self._in_text

    def _in_text(self, text: str) -> str:
        whole = self._held + text
        found = whole.find(TAG)
        if found >= 0:
            begin = len(whole[:found].rstrip())
            self._show(whole[:begin])
            self._tag_at = found - begin
            self._held = whole[begin : found + len(TAG)]
            self._state = self._behind_tag
            return whole[found + len(TAG) :]
        tag_at = len(whole) - _length_of_beginning(whole)
        begin = len(whole[:tag_at].rstrip())
        self._show(whole[:begin])
        self._held = whole[begin:]
        return ""

    def _behind_tag(self, text: str) -> str:
        """A call begins where its arguments do."""
        head_at = self._tag_at + len(TAG)
        for position, character in enumerate(text):
            head = self._held[head_at:]
            name = head[len(BEFORE_NAME) :].partition('"')[0] if len(head) > len(BEFORE_NAME) else ""
            if name and head == BEFORE_NAME + name + BEFORE_ARGUMENTS and character == "{":
                self._pieces.append(CallBegin(self.num_calls, name))
                self.num_calls += 1
                self._held = ""
                self._nesting = _Nesting()
                self._state = self._in_arguments
                return text[position:]
            if not _may_be_head(head + character):
                self._show(self._held)
                self._held = ""
                self._state = self._in_text
                return text[position:]
            self._held += character
        return ""

    def _in_arguments(self, text: str) -> str:
        for position, character in enumerate(text):
            if self._nesting.ends_with(character):
                self._pieces.append(Arguments(self.num_calls - 1, text[: position + 1]))
                self._state = self._behind_arguments
                return text[position + 1 :]
        self._pieces.append(Arguments(self.num_calls - 1, text))
        return ""

    def _behind_arguments(self, text: str) -> str:
        for position, character in enumerate(text):
            if not AFTER_ARGUMENTS.startswith(self._held + character):
                self._state = self._in_text
                rest, self._held = self._held + text[position:], ""
                return rest
            self._held += character
            if self._held == AFTER_ARGUMENTS:
                self._held = ""
                self._state = self._in_text
                return text[position + 1 :]
        return ""

    def _show(self, text: str) -> None:
        if text:
            self._pieces.append(Text(text))


def _length_of_beginning(text: str) -> int:
    """Of the longest end of a text that a tag begins with."""
    return next((length for length in range(len(TAG) - 1, 0, -1) if text.endswith(TAG[:length])), 0)


def _may_be_head(head: str) -> bool:
    """Whether a text is the beginning of what stands between a tag and its arguments."""
    if len(head) <= len(BEFORE_NAME):
        return BEFORE_NAME.startswith(head)
    name, quote, _ = head[len(BEFORE_NAME) :].partition('"')
    if NAME.fullmatch(name) is None:
        return False
    return not quote or BEFORE_ARGUMENTS.startswith(head[len(BEFORE_NAME) + len(name) :])
