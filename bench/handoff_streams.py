"""Load of `bench.handoff`: streams that run on, and long prompts that nobody has seen which come while they do."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass, field

from bench.event_stream import completion_events
from bench.load import FIRST_TOKEN_ID, LAST_TOKEN_ID
from bench.load_http import HttpLoad, RequestFailedError

# A machine that does not keep up is not given ever more.
_MOST_PROMPTS = 4
# So much that what answers is another worker than the one that has computed the prompt.
_PROMPT_OUTPUT = 32
_STREAM_TOKENS = 4000
_RETRY_S = 0.2


@dataclass(slots=True)
class Prompts:
    """What became of the long prompts. left_out: not sent, as too many were open."""

    ttfts_s: list[float] = field(default_factory=list)
    left_out: int = 0
    failed: int = 0

    def add(self, more: Prompts) -> None:
        """What became of further ones."""
        self.ttfts_s += more.ttfts_s
        self.left_out += more.left_out
        self.failed += more.failed


class Streams:
    """So many answers at once, each followed by another; `gaps_s` are the times between their events since `reset`."""

    def __init__(self, port: int, model: str, count: int) -> None:
        self.gaps_s: list[float] = []
        self._port = port
        self._model = model
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(count)]

    def reset(self) -> None:
        """Begin anew with the gaps."""
        self.gaps_s = []

    async def close(self) -> None:
        """End them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, number: int) -> None:
        body = {"model": self._model, "prompt": f"Story {number}:", "max_tokens": _STREAM_TOKENS}
        body |= {"ignore_eos": True, "temperature": 1.0}
        while True:
            last_s = 0.0
            # A mesh that is not ready for it is asked again.
            with contextlib.suppress(ConnectionError):
                async for _ in completion_events(self._port, body):
                    now_s = time.perf_counter()
                    if last_s:
                        self.gaps_s.append(now_s - last_s)
                    last_s = now_s
            await asyncio.sleep(_RETRY_S)


async def offer(load: HttpLoad, rng: random.Random, *, num_tokens: int, every_s: float, seconds: float) -> Prompts:
    """Send prompts of random tokens for so long, and wait for all answers."""
    found, open_prompts = Prompts(), set[asyncio.Task[None]]()

    async def send(prompt: list[int]) -> None:
        try:
            found.ttfts_s.append((await load.send(prompt, _PROMPT_OUTPUT)).ttft_s)
        except RequestFailedError:
            found.failed += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(max(1, round(seconds / every_s))):
            if len(open_prompts) < _MOST_PROMPTS:
                prompt = [rng.randrange(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(num_tokens)]
                task = group.create_task(send(prompt))
                open_prompts.add(task)
                task.add_done_callback(open_prompts.discard)
            else:
                found.left_out += 1
            await asyncio.sleep(every_s)
    return found
