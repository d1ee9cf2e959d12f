"""Streams of `bench.drain`: long prompts, what each is told and when, and how long a drain keeps each waiting."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bench.event_stream import completion_events
from bench.load import FIRST_TOKEN_ID, LAST_TOKEN_ID
from services.common.models import DEFAULT_MODEL

_TIMEOUT_S = 300.0
_RETRY_S = 0.5


@dataclass(slots=True)
class Stream:
    """One answer as it comes. times_s: of its events, of one clock."""

    text: str = ""
    error: str = ""
    times_s: list[float] = field(default_factory=list)
    is_done: bool = False

    def gaps_s(self, first_s: float, end_s: float) -> list[float]:
        """Times between two events, of which the second came after first_s and the first before end_s."""
        return [after - before for before, after in pairwise(self.times_s) if after > first_s and before < end_s]


def body_of(number: int, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    """Even ones are greedy, odd ones seeded at temperature 1; no two prompts share a block."""
    rng = random.Random(number)
    prompt = [rng.randrange(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(prompt_tokens)]
    sampling = {"temperature": 0} if number % 2 == 0 else {"temperature": 1, "seed": number}
    return {"model": DEFAULT_MODEL, "prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True, **sampling}


async def follow(port: int, body: dict[str, Any], stream: Stream) -> None:
    """Read an answer to its end; what fails is in the stream. One that is refused for now is sent again."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            while not await _is_served(port, body, stream):  # noqa: ASYNC110
                await asyncio.sleep(_RETRY_S)
    except (OSError, TimeoutError, EOFError) as error:
        stream.error = f"{type(error).__name__}: {error}"
    if not stream.is_done and not stream.error:
        stream.error = "the stream ended early"


async def _is_served(port: int, body: dict[str, Any], stream: Stream) -> bool:
    try:
        async for data in completion_events(port, body):
            stream.times_s.append(time.monotonic())
            _take(stream, data)
    except ConnectionError as error:
        if stream.times_s or " 503 " not in str(error):
            raise
        return False
    return True


async def wait_for_events(streams: Sequence[Stream], count: int) -> None:
    """Until each has had so many. Raises RuntimeError when one has ended before, TimeoutError."""
    async with asyncio.timeout(_TIMEOUT_S):
        while any(len(one.times_s) < count for one in streams):
            if any(one.error or one.is_done for one in streams):
                raise RuntimeError(f"a stream ended before all had begun: {[one.error for one in streams]}")
            await asyncio.sleep(0.02)


def _take(stream: Stream, data: str) -> None:
    if data == "[DONE]":
        stream.is_done = True
        return
    event = json.loads(data)
    if "error" in event:
        stream.error = event["error"]["message"]
    elif event["choices"]:
        stream.text += event["choices"][0]["text"]
