"""A recorded trace at toy scale as an open loop of streamed requests, and the figures of it.

Toy scale: one token stands for several, and blocks of 512 tokens become blocks of 16 (shorter ones are grouped), so
that every hit and miss stays what it was. Requests are sent when the trace says, however many are under way; those of
one session wait for each other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from bench.load import FIRST_TOKEN_ID, LAST_TOKEN_ID, Timing, percentile
from bench.load_http import RequestFailedError
from services.common.blocks import BLOCK_TOKENS, BlockId
from services.router.simulator.trace import Trace, TraceRequest, ideal_hit_tokens


@dataclass(frozen=True, slots=True)
class ToyRequest:
    """arrival_s: from the beginning of the load. session: "" for none."""

    arrival_s: float
    prompt: tuple[int, ...]
    output_tokens: int
    session: str


@dataclass(frozen=True, slots=True)
class Workload:
    """trace: the requests without their content. ideal_tokens: of the prompts what one infinite cache would have."""

    trace: Trace
    requests: tuple[ToyRequest, ...]
    prompt_tokens: int
    ideal_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one load. goodput_rps: requests that kept both objectives, of the seconds in which requests came."""

    requests: int
    goodput_rps: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    hit_rate: float
    hit_rate_of_ideal: float
    refused: int
    unfinished: int


def toy_scale(trace: Trace, scale: int, duration_s: float, context_length: int) -> Workload:
    """The requests of the trace's first `duration_s`; those beyond the context (toy tokens) are left out.

    scale: tokens for which one stands. Raises ValueError where blocks would become shorter than blocks are.
    """
    group, rest = divmod(scale * BLOCK_TOKENS, trace.block_tokens)
    if not group or rest:
        raise ValueError(f"scale {scale}: blocks of {trace.block_tokens} tokens are no part of {BLOCK_TOKENS}")
    chosen = [
        TraceRequest(
            one.arrival_s,
            -(-one.prompt_tokens // scale),
            max(1, -(-one.output_tokens // scale)),
            # The id of a block names all blocks before it, too.
            one.block_ids[group - 1 :: group],
            one.session,
        )
        for one in trace.requests
        if one.arrival_s < duration_s and one.prompt_tokens + one.output_tokens < scale * (context_length - 2)
    ]
    requests = tuple(
        ToyRequest(one.arrival_s, _tokens(one, index), one.output_tokens, one.session)
        for index, one in enumerate(chosen)
    )
    prompts = sum(one.prompt_tokens for one in chosen)
    return Workload(Trace(tuple(chosen), BLOCK_TOKENS), requests, prompts, sum(ideal_hit_tokens(chosen, BLOCK_TOKENS)))


def _tokens(request: TraceRequest, index: int) -> tuple[int, ...]:
    """Equal ids give equal tokens; what follows the last full block is this request's alone."""
    found: list[int] = []
    for block_id in request.block_ids:
        found += _draw(block_id, BLOCK_TOKENS)
    found += _draw(BlockId(index.to_bytes(16, "big")), max(0, request.prompt_tokens - len(found)))
    return tuple(found[: request.prompt_tokens])


def _draw(seed: BlockId, count: int) -> list[int]:
    number = int.from_bytes(blake2b(seed, digest_size=8).digest(), "little")
    drawn: list[int] = np.random.default_rng(number).integers(FIRST_TOKEN_ID, LAST_TOKEN_ID, count).tolist()
    return drawn


async def run(
    send: Callable[[Sequence[int], int], Awaitable[Timing]], requests: Sequence[ToyRequest], patience_s: float
) -> tuple[list[Timing], int, int]:
    """Timings of what was served, and how many were refused and had not ended `patience_s` after the last arrival."""
    timings: list[Timing] = []
    refused = 0
    started_s = time.perf_counter()

    async def one(request: ToyRequest, before: asyncio.Task[None] | None) -> None:
        nonlocal refused
        await asyncio.sleep(started_s + request.arrival_s - time.perf_counter())
        if before is not None:
            await asyncio.wait({before})
        try:
            timings.append(await send(request.prompt, request.output_tokens))
        except RequestFailedError:
            refused += 1

    tasks: list[asyncio.Task[None]] = []
    last: dict[str, asyncio.Task[None]] = {}
    for request in requests:
        task = asyncio.create_task(one(request, last.get(request.session)))
        tasks.append(task)
        if request.session:
            last[request.session] = task
    end_s = requests[-1].arrival_s + patience_s
    done, late = await asyncio.wait(tasks, timeout=started_s + end_s - time.perf_counter())
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    for task in done:
        task.result()
    return timings, refused, len(late)


def outcome(
    workload: Workload, timings: Sequence[Timing], refused: int, unfinished: int, *, ttft_s: float, tpot_s: float
) -> Outcome:
    """Figures under these objectives. Refused and unfinished requests miss them, and hit nothing.

    Raises ValueError when nothing was served.
    """
    if not timings:
        raise ValueError(f"nothing was served: {refused} requests refused, {unfinished} unfinished")
    ttfts = sorted(one.ttft_s for one in timings)
    tpots = sorted(one.tpot_s for one in timings if one.output_tokens > 1)
    good = sum(one.ttft_s <= ttft_s and one.tpot_s <= tpot_s for one in timings)
    cached = sum(one.cached_tokens for one in timings)
    return Outcome(
        requests=len(workload.requests),
        goodput_rps=good / workload.requests[-1].arrival_s,
        ttft_p50_s=percentile(ttfts, 0.5),
        ttft_p99_s=percentile(ttfts, 0.99),
        tpot_p50_s=percentile(tpots, 0.5),
        hit_rate=cached / workload.prompt_tokens,
        hit_rate_of_ideal=cached / max(1, workload.ideal_tokens),
        refused=refused,
        unfinished=unfinished,
    )
