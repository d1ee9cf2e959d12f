"""What clients of `bench.mixed` ask for: the kinds of `bench.chaos_jobs` and a few more, of each model; conversations.

All models are asked the very same, so that a block or an answer of one would be taken for another's if anything could
mix them up. A conversation's turns are jobs of their own: each begins with all that was said before it, so that it
finds the blocks of earlier turns in caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench.chaos_jobs import CHAT, KINDS, SCHEMA, TOOLS, Job, Kind, make_jobs

EMBEDDINGS = "/v1/embeddings"
_TURN = Kind("turn", CHAT, {"temperature": 1})
_EMBEDDED = Kind("embeddings", EMBEDDINGS, streams=False)
# Long enough to end by themselves as a rule.
_WHOLE = {"temperature": 1, "ignore_eos": False, "max_tokens": 120}
_FORCED = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
MIXED_KINDS: tuple[Kind, ...] = (
    *KINDS,
    Kind("echo", fields={"temperature": 0, "echo": True, "logprobs": 2}, streams=False),
    Kind("regex", fields={**_WHOLE, "guided_regex": "[a-z]{4,9}( [a-z]{2,9}){3,9}"}),
    Kind("unary schema", CHAT, {**_WHOLE, "response_format": SCHEMA}, streams=False),
    Kind("unary tools", CHAT, {**_WHOLE, **_FORCED}, streams=False),
    Kind("free tools", CHAT, {"temperature": 1, "ignore_eos": False, "tools": TOOLS, "n": 2}),
)
_SYSTEM = "You tell stories about small towns by the sea, the people who live in them and what they find on the beach. "
_QUESTIONS = (
    "Who lives in the last house of the town?",
    "What was found on the beach that morning?",
    "Tell me what the others said about it.",
    "How does it end?",
)


def model_jobs(model: str, tokens: int, first: int) -> list[Job]:
    """One of every kind and embeddings, numbered from `first`."""
    jobs = make_jobs(MIXED_KINDS, tokens, 1, model)
    body = {"model": model, "input": ["A letter from the town by the sea.", _SYSTEM * 2]}
    jobs.append(Job(len(jobs), _EMBEDDED, body))
    return [replace(job, number=first + job.number) for job in jobs]


def first_turn(model: str, tokens: int, number: int) -> Job:
    """The beginning of a conversation."""
    messages = [{"role": "system", "content": _SYSTEM * 3}, {"role": "user", "content": _QUESTIONS[0]}]
    body = {"model": model, "max_tokens": tokens, "seed": 1, "messages": messages, **_TURN.fields}
    return Job(number, _TURN, {**body, "stream": True, "stream_options": {"include_usage": True}})


def next_turn(turn: Job, answer: str, number: int) -> Job | None:
    """What is asked once `turn` was answered so; None: nothing more."""
    messages: Sequence[dict[str, str]] = turn.body["messages"]
    asked = sum(message["role"] == "user" for message in messages)
    if asked == len(_QUESTIONS):
        return None
    more = [{"role": "assistant", "content": answer}, {"role": "user", "content": _QUESTIONS[asked]}]
    return Job(number, _TURN, {**turn.body, "messages": [*messages, *more]})
