"""A closed loop of streaming requests and the figures of it: TTFT, TPOT, tokens/s.

Pure of transports: `send` makes one request and tells when its first and last token came. Concurrency c means that c
clients each send their next request as soon as the last one has ended.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

FIRST_TOKEN_ID = 1_000
LAST_TOKEN_ID = 40_000
REQUEST_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths in tokens. The shared ones come first and are the same in every request."""

    name: str
    shared_tokens: int
    unique_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """What one request took, seconds from sending it; prompt_tokens 0: the server does not say."""

    ttft_s: float
    last_token_s: float
    output_tokens: int
    cached_tokens: int
    prompt_tokens: int = 0

    @property
    def tpot_s(self) -> float:
        """Time for each output token after the first."""
        return (self.last_token_s - self.ttft_s) / max(self.output_tokens - 1, 1)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one round, or the medians of several."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    output_tokens_per_s: float
    cached_tokens: float

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return {name: round(value, 2) for name, value in asdict(self).items()}


Send = Callable[[Sequence[int], int], Awaitable[Timing]]


def prompts(workload: Workload, rng: random.Random) -> Iterator[list[int]]:
    """Token ids without end; no two share their unique part."""
    shared = _tokens(workload.shared_tokens, rng)
    while True:
        yield shared + _tokens(workload.unique_tokens, rng)


async def run_round(
    send: Send, source: Iterator[list[int]], *, workload: Workload, concurrency: int, count: int
) -> Figures:
    """`count` requests by `concurrency` clients. Raises the first request's error."""
    remaining = iter([next(source) for _ in range(count)])
    timings: list[Timing] = []

    async def client() -> None:
        for prompt in remaining:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                timings.append(await send(prompt, workload.output_tokens))

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, count)):
            group.create_task(client())
    return figures(timings, time.perf_counter() - start)


def figures(timings: Sequence[Timing], wall_s: float) -> Figures:
    """Figures of one round."""
    ttfts = sorted(one.ttft_s * 1e3 for one in timings)
    return Figures(
        ttft_p50_ms=statistics.median(ttfts),
        ttft_p99_ms=percentile(ttfts, 0.99),
        tpot_p50_ms=statistics.median(one.tpot_s * 1e3 for one in timings),
        output_tokens_per_s=sum(one.output_tokens for one in timings) / wall_s,
        cached_tokens=statistics.mean(one.cached_tokens for one in timings),
    )


def medians(rounds: Sequence[Figures]) -> Figures:
    """Field by field."""
    return Figures(*(statistics.median(values) for values in zip(*(_values(one) for one in rounds), strict=True)))


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """Linear between the two nearest ranks of ascending values."""
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def _values(one: Figures) -> tuple[float, ...]:
    return tuple(asdict(one).values())


def _tokens(count: int, rng: random.Random) -> list[int]:
    return [rng.randrange(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(count)]
