"""The calls of one choice for either API: what is found in its text, ids, and why the choice has ended. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from hashlib import blake2b

from services.gateway.output import STOP
from services.gateway.tools.call_format import CallFormat, short_id
from services.gateway.tools.call_parser import CallParser, Piece

TOOL_CALLS = "tool_calls"
_ID_BYTES = 12


class ChoiceCalls:
    """State of one choice."""

    def __init__(
        self, answer_id: str, choice: int, call_format: CallFormat, names: Mapping[str, Collection[str]]
    ) -> None:
        """answer_id: a repeated request has the same, and so the same ids of calls. names: see `CallParser`."""
        self._parser = CallParser(call_format, names)
        self._seed = f"{answer_id}/{choice}"
        self._has_short_ids = call_format.has_short_ids

    def push(self, text: str) -> list[Piece]:
        """What is known with new text; nothing while that may be a part of something."""
        return self._parser.push(text)

    def finish(self) -> list[Piece]:
        """What was held back, when the answer has ended."""
        return self._parser.finish()

    def finish_reason(self, reason: str) -> str:
        """That of an answer which ended by itself is its calls, unless the last was cut by a stop string."""
        return TOOL_CALLS if reason == STOP and self._parser.all_complete else reason

    def call_id(self, index: int) -> str:
        """Of the index-th call."""
        if self._has_short_ids:
            return short_id(f"{self._seed}/{index}")
        return f"call_{blake2b(f'{self._seed}/{index}'.encode(), digest_size=_ID_BYTES).hexdigest()}"
