"""An open loop of several tenants and classes at once, and what became of every request."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from bench.load import FIRST_TOKEN_ID, LAST_TOKEN_ID, Timing, percentile
from bench.load_http import RequestFailedError

Send = Callable[[Sequence[int], int], Awaitable[Timing]]
_OVERLOAD_STATUS = (429, 503)


@dataclass(frozen=True, slots=True)
class Source:
    """Who sends, and how often: arrivals are Poisson."""

    name: str
    send: Send
    rate_rps: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one request: a timing, or a status other than 200 with its Retry-After."""

    source: str
    timing: Timing | None
    status: int = 200
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Objectives:
    """Bounds of a good answer."""

    ttft_s: float
    tpot_s: float

    def are_met(self, timing: Timing) -> bool:
        """Whether an answer is good."""
        return timing.ttft_s <= self.ttft_s and timing.tpot_s <= self.tpot_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of some answers. kept: share of the served ones that met the objectives; 1 where none was served."""

    sent: int
    served: int
    goodput_rps: float
    kept: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    refused: dict[int, int]
    without_retry_after: int


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths of every request, in tokens; no two share a prompt."""

    prompt_tokens: int
    output_tokens: int


async def attempt(source: Source, shape: Shape, rng: random.Random) -> Answer:
    """Send one request."""
    prompt = [rng.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(shape.prompt_tokens)]
    try:
        return Answer(source.name, await source.send(prompt, shape.output_tokens))
    except RequestFailedError as error:
        after = error.header("retry-after")
        return Answer(source.name, None, error.status, float(after) if after else None)


async def open_loop(sources: Sequence[Source], shape: Shape, duration_s: float, rng: random.Random) -> list[Answer]:
    """Answers to all requests that arrive within `duration_s`, however long they take."""
    tasks: list[asyncio.Task[Answer]] = []
    start_s = time.perf_counter()

    async def arrivals(source: Source) -> None:
        at_s = rng.expovariate(source.rate_rps)
        while at_s < duration_s:
            await asyncio.sleep(start_s + at_s - time.perf_counter())
            tasks.append(asyncio.create_task(attempt(source, shape, rng)))
            at_s += rng.expovariate(source.rate_rps)

    await asyncio.gather(*(arrivals(source) for source in sources))
    return list(await asyncio.gather(*tasks))


async def closed_loop(source: Source, shape: Shape, clients: int, duration_s: float, rng: random.Random) -> float:
    """Requests served per second when `clients` send one after another; the first second does not count."""
    start_s = time.perf_counter()
    ends: list[float] = []

    async def client() -> None:
        while time.perf_counter() < start_s + duration_s:
            if (await attempt(source, shape, rng)).timing is not None:
                ends.append(time.perf_counter() - start_s)

    await asyncio.gather(*(client() for _ in range(clients)))
    return sum(1.0 < end_s <= duration_s for end_s in ends) / (duration_s - 1.0)


def outcome(answers: Sequence[Answer], objectives: Objectives, duration_s: float) -> Outcome:
    """Figures of answers to what was sent within `duration_s`."""
    timings = [answer.timing for answer in answers if answer.timing is not None]
    refusals = [answer for answer in answers if answer.timing is None]
    good = sum(map(objectives.are_met, timings))
    ttfts = sorted(timing.ttft_s for timing in timings) or [0.0]
    tpots = sorted(timing.tpot_s for timing in timings) or [0.0]
    return Outcome(
        sent=len(answers),
        served=len(timings),
        goodput_rps=good / duration_s,
        kept=good / len(timings) if timings else 1.0,
        ttft_p50_s=percentile(ttfts, 0.5),
        ttft_p99_s=percentile(ttfts, 0.99),
        tpot_p50_s=percentile(tpots, 0.5),
        refused=dict(Counter(answer.status for answer in refusals)),
        without_retry_after=sum(
            answer.status not in _OVERLOAD_STATUS or answer.retry_after_s is None for answer in refusals
        ),
    )
