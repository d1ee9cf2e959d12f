"""Text and calls of a chat's choice in the OpenAI API's two forms: deltas of a stream, and a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.gateway.tools.call_parser import Arguments, CallBegin, Piece, Text
from services.gateway.tools.choice_calls import ChoiceCalls


class CallDeltas:
    """State of one choice."""

    def __init__(self, calls: ChoiceCalls) -> None:
        self._calls = calls
        self._is_empty = True

    def push(self, text: str) -> list[dict[str, Any]]:
        """Deltas of new text; none while it may be a part of something."""
        return self._deltas(self._calls.push(text))

    def finish(self) -> list[dict[str, Any]]:
        """Deltas of what was held back, when the answer has ended; of an empty answer, its empty text."""
        deltas = self._deltas(self._calls.finish())
        return [{"content": ""}] if self._is_empty else deltas

    def finish_reason(self, reason: str) -> str:
        """See `ChoiceCalls.finish_reason`."""
        return self._calls.finish_reason(reason)

    def _deltas(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        self._is_empty = self._is_empty and not pieces
        return [self._delta(piece) for piece in pieces]

    def _delta(self, piece: Piece) -> dict[str, Any]:
        match piece:
            case Text(text):
                return {"content": text}
            case CallBegin(index, name):
                function = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": index, **_call(self._calls.call_id(index), function)}]}
            case Arguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def message_fields(deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fields of a message that consists of these deltas: content, null where it has none, and its calls."""
    texts = [delta["content"] for delta in deltas if "content" in delta]
    calls: list[dict[str, Any]] = []
    for part in (part for delta in deltas for part in delta.get("tool_calls", ())):
        if "id" in part:
            calls.append(_call(part["id"], dict(part["function"])))
        else:
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return {"content": "".join(texts) if texts else None, **({"tool_calls": calls} if calls else {})}


def _call(call_id: str, function: dict[str, str]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": function}
