"""A trace at toy scale keeps its hits; an open loop sends on time, in sessions one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest

from bench.load import Timing
from bench.load_http import RequestFailedError
from bench.sim_mesh_load import ToyRequest, outcome, run, toy_scale
from services.common.blocks import BlockId
from services.router.simulator.trace import Trace, TraceRequest


def ids(*numbers: int) -> tuple[BlockId, ...]:
    return tuple(BlockId(number.to_bytes(16, "little")) for number in numbers)


# Three blocks in common, then one that only the first has; the last request is over the edge of what is replayed.
TRACE = Trace(
    (
        TraceRequest(0.0, 4 * 512 + 40, 350, ids(1, 2, 3, 4)),
        TraceRequest(1.0, 3 * 512 + 7, 1, ids(1, 2, 3)),
        TraceRequest(9.0, 512, 10, ids(1)),
    ),
    512,
)


def test_blocks_become_blocks() -> None:
    workload = toy_scale(TRACE, 32, 5.0, 8000)
    first, second = workload.requests
    assert [len(first.prompt), len(second.prompt)] == [66, 49]
    assert first.prompt[:48] == second.prompt[:48]
    assert first.prompt[48] != second.prompt[48]
    assert [first.output_tokens, second.output_tokens] == [11, 1]
    assert (workload.prompt_tokens, workload.ideal_tokens) == (66 + 49, 48)


def test_short_blocks_are_grouped_and_long_requests_left_out() -> None:
    chain = ids(*range(8))
    trace = Trace((TraceRequest(0.0, 128, 8, chain), TraceRequest(1.0, 8000, 8, chain)), 16)
    (only,) = toy_scale(trace, 4, 5.0, 1000).requests
    assert len(only.prompt) == 32
    with pytest.raises(ValueError, match="scale 4"):
        toy_scale(TRACE, 4, 5.0, 1000)


async def test_sessions_wait_and_refusals_are_counted() -> None:
    requests = [ToyRequest(0.0, (number,), 1, session) for number, session in enumerate(["a", "a", "", "b", "a", ""])]
    requests.append(ToyRequest(0.01, (99,), 1, ""))
    spans: dict[int, tuple[float, float]] = {}
    loop = asyncio.get_running_loop()

    async def send(prompt: Sequence[int], output_tokens: int) -> Timing:
        if prompt[0] == 3:
            raise RequestFailedError("full")
        if prompt[0] == 99:
            await asyncio.sleep(60)
        began_s = loop.time()
        await asyncio.sleep(0.02)
        spans[prompt[0]] = began_s, loop.time()
        return Timing(0.02, 0.02, output_tokens, 0, 1)

    timings, refused, unfinished = await run(send, requests, patience_s=1.0)
    assert (len(timings), refused, unfinished) == (5, 1, 1)
    assert all(spans[before][1] <= spans[after][0] for before, after in pairwise([0, 1, 4]))


def test_what_was_not_served_misses() -> None:
    workload = toy_scale(TRACE, 32, 5.0, 8000)
    served = [Timing(0.5, 0.9, 5, 48, 49), Timing(3.0, 3.1, 2, 0, 66)]
    found = outcome(workload, served, 3, 1, ttft_s=2.0, tpot_s=0.2)
    assert (found.goodput_rps, found.refused, found.unfinished) == (1.0, 3, 1)
    assert found.hit_rate == pytest.approx(48 / 115)
    assert found.hit_rate_of_ideal == 1.0
    with pytest.raises(ValueError, match="nothing was served: 3 requests refused"):
        outcome(workload, [], 3, 1, ttft_s=2.0, tpot_s=0.2)
