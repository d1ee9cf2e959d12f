"""What clients of `bench.chaos` ask for: a table of kinds, each a way in which requests differ.

A job is a kind and a number, and says the same whenever it is asked. Every kind has its answer compared whole: texts of
all choices, finish reasons, log probabilities, and the number of output tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from services.common.models import DEFAULT_MODEL

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_WORDS = ("river", "stone", "garden", "light", "window", "paper", "music", "winter", "horse", "bread", "answer")
_PROMPT_WORDS = 48
# Of a text, where its stop string is taken from, and how long that is.
_STOP_SHARE, _STOP_CHARACTERS = 0.6, 12
SCHEMA: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {
        "name": "story",
        "schema": {
            "type": "object",
            "properties": {
                "title": {"type": "string", "maxLength": 40},
                "words": {"type": "array", "items": {"enum": list(_WORDS)}, "minItems": 4, "maxItems": 12},
                "length": {"type": "integer", "minimum": 0, "maximum": 9999},
            },
            "required": ["title", "words", "length"],
            "additionalProperties": False,
        },
    },
}
TOOLS = [{"type": "function", "function": {"name": "tell", "parameters": SCHEMA["json_schema"]["schema"]}}]


@dataclass(frozen=True, slots=True)
class Kind:
    """is_keyed: with an idempotency key, and now and then asked by two clients at once. cuts: ends at a stop string."""

    name: str
    path: str = COMPLETIONS
    fields: Mapping[str, Any] = field(default_factory=dict)
    streams: bool = True
    is_keyed: bool = False
    cuts: bool = False


# One line each; a new kind of output is one more.
KINDS: tuple[Kind, ...] = (
    Kind("greedy", fields={"temperature": 0}),
    Kind("seeded", fields={"temperature": 1}),
    Kind("n=2", fields={"temperature": 1, "n": 2}),
    Kind("logprobs", fields={"temperature": 0, "logprobs": 3}),
    Kind("chat", CHAT, {"temperature": 1}),
    Kind("chat logprobs", CHAT, {"temperature": 1, "logprobs": True, "top_logprobs": 4, "n": 2}),
    Kind("stop", fields={"temperature": 0}, cuts=True),
    Kind("unary", fields={"temperature": 1}, streams=False),
    Kind("unary chat", CHAT, {"temperature": 1, "logprobs": True, "top_logprobs": 2}, streams=False),
    Kind("keyed", fields={"temperature": 1}, is_keyed=True),
    Kind("keyed unary", CHAT, {"temperature": 1, "n": 2}, streams=False, is_keyed=True),
    # Ends by itself, at the latest with the last field.
    Kind("schema", CHAT, {"temperature": 1, "n": 2, "ignore_eos": False, "response_format": SCHEMA}),
    Kind("tools", CHAT, {"temperature": 1, "ignore_eos": False, "tools": TOOLS, "tool_choice": "required"}),
)


@dataclass(frozen=True, slots=True)
class Job:
    """number: among all jobs, and the seed."""

    number: int
    kind: Kind
    body: dict[str, Any]

    def stopping_in(self, text: str) -> Job:
        """The same, ended by a string that is in the middle of its text."""
        start = int(len(text) * _STOP_SHARE)
        return replace(self, body={**self.body, "stop": [text[start : start + _STOP_CHARACTERS]]})


def make_jobs(kinds: Sequence[Kind], tokens: int, each: int = 2, model: str = DEFAULT_MODEL) -> list[Job]:
    """`each` of every kind, of so many output tokens a choice."""
    pairs = [(kind, turn) for turn in range(each) for kind in kinds]
    return [Job(number, kind, _body(number, kind, tokens, model)) for number, (kind, _) in enumerate(pairs)]


def _body(number: int, kind: Kind, tokens: int, model: str) -> dict[str, Any]:
    words = " ".join(_WORDS[(number * 5 + i * (number + 3)) % len(_WORDS)] for i in range(_PROMPT_WORDS))
    text = f"Story {number}. {words}"
    asked = {"prompt": text} if kind.path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    streamed = {"stream": True, "stream_options": {"include_usage": True}} if kind.streams else {}
    return {
        "model": model,
        "max_tokens": tokens,
        "ignore_eos": True,
        "seed": number,
        **asked,
        **kind.fields,
        **streamed,
    }
