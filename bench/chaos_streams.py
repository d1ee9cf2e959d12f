"""Streams of `bench.chaos`: what each client is told, when, and how that differs from the undisturbed answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common.models import DEFAULT_MODEL

_TIMEOUT_S = 180.0
_WORDS = ("river", "stone", "garden", "light", "window", "paper", "music", "winter", "horse", "bread", "answer")


@dataclass(slots=True)
class Answer:
    """One streamed completion. pause_s: the longest time between two events after the first."""

    job: int
    text: str = ""
    error: str = ""
    done: bool = False
    events: int = 0
    pause_s: float = 0.0
    started_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0


def body_of(job: int, tokens: int) -> dict[str, Any]:
    """Even jobs are greedy, odd ones seeded at temperature 1."""
    words = " ".join(_WORDS[(job * 5 + i * (job + 3)) % len(_WORDS)] for i in range(48))
    sampling = {"temperature": 0} if job % 2 == 0 else {"temperature": 1, "seed": job}
    request = {"model": DEFAULT_MODEL, "prompt": f"Story {job}. {words}", "max_tokens": tokens}
    return {**request, **sampling, "ignore_eos": True, "stream": True}


async def ask(port: int, job: int, tokens: int) -> Answer:
    """Send a job and read its stream to the end; what fails is in the answer."""
    answer, last_s = Answer(job), 0.0
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            async for data in _events(port, body_of(job, tokens)):
                now_s = time.monotonic()
                if answer.events:
                    answer.pause_s = max(answer.pause_s, now_s - last_s)
                last_s = now_s
                answer.events += 1
                _take(answer, data)
    except (OSError, TimeoutError, EOFError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    if not answer.done and not answer.error:
        answer.error = "the stream ended early"
    answer.ended_s = time.monotonic()
    return answer


def difference(text: str, expected: str) -> str:
    """Empty when equal, else how it differs: the rest repeats what was there, lacks some of it, or is another one."""
    if text == expected:
        return ""
    same = next((i for i, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b), len(expected))
    rest = text[same:]
    if len(rest) > 8 and rest[:8] in expected[:same]:
        return "duplicate"
    if len(rest) > 8 and rest[:8] in expected[same:]:
        return "gap"
    return "other"


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that `share` of the values do not exceed; None of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def _take(answer: Answer, data: str) -> None:
    if data == "[DONE]":
        answer.done = True
        return
    event = json.loads(data)
    if "error" in event:
        answer.error = event["error"]["message"]
    elif event["choices"]:
        answer.text += event["choices"][0]["text"]


async def _events(port: int, body: dict[str, Any]) -> AsyncIterator[str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    payload = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: mesh\r\nconnection: close\r\ncontent-type: application/json\r\n"
    try:
        writer.write(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
        status = await reader.readline()
        await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in status:
            raise ConnectionError((status + await reader.read()).decode(errors="replace"))
        while line := await reader.readline():
            if line.startswith(b"data: "):
                yield line[6:].decode().strip()
    finally:
        writer.close()
