"""Log probabilities in the two formats of the OpenAI API. They are of the model's own distribution, before temperature.

A token that is no whole character is shown with U+FFFD; `bytes` (chat) has it exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvmesh.v1.common_pb2 import PositionLogprobs

from services.gateway.text.vocabulary import Vocabulary

FLOOR = -9999.0


def chat_logprobs(positions: Sequence[PositionLogprobs], vocabulary: Vocabulary) -> dict[str, Any]:
    """`{"content": [...], "refusal": null}` for these tokens."""
    content = [
        {
            **_entry(position.chosen.token_id, position.chosen.logprob, vocabulary),
            "top_logprobs": [_entry(top.token_id, top.logprob, vocabulary) for top in position.top],
        }
        for position in positions
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    positions: Sequence[PositionLogprobs], vocabulary: Vocabulary, offset: int
) -> tuple[dict[str, Any], int]:
    """The four parallel arrays for these tokens, and the text offset (characters) after them."""
    tokens, logprobs, tops, offsets = [], [], [], []
    for position in positions:
        token = vocabulary.text_of(position.chosen.token_id)
        value = max(FLOOR, position.chosen.logprob)
        top = {vocabulary.text_of(other.token_id): max(FLOOR, other.logprob) for other in position.top}
        tokens.append(token)
        logprobs.append(value)
        tops.append({**top, token: value})
        offsets.append(offset)
        offset += _started_characters(vocabulary.bytes_of(position.chosen.token_id))
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}, offset


def _entry(token_id: int, logprob: float, vocabulary: Vocabulary) -> dict[str, Any]:
    raw = vocabulary.bytes_of(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": max(FLOOR, logprob), "bytes": list(raw)}


def _started_characters(raw: bytes) -> int:
    """Characters that begin in these bytes: all but UTF-8 continuation bytes."""
    return sum(byte & 0xC0 != 0x80 for byte in raw)
