"""Exact mode through a real worker: output that was cut anywhere goes on with the very tokens that would have come.

Greedy and seeded, several choices, penalties and log probabilities; with nothing cached, and over prefix hits; begun
with what is known, and held while more becomes known.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvmesh.v1 import common_pb2, worker_pb2

from tests.support.valkey import Valkey
from tests.worker.replica import Answer, WorkerProcess, running_worker
from tests.worker.test_determinism import UNCACHED, prompt
from tests.worker.test_serve import Stream

MAX_TOKENS = 14
GREEDY = common_pb2.SamplingParams(temperature=0.0, num_logprobs=3)
SEEDED = common_pb2.SamplingParams(
    temperature=1.0, seed=7, num_logprobs=2, presence_penalty=0.6, frequency_penalty=0.3, repetition_penalty=1.2
)
# Sampling, choices, the number of the prompt.
CASES = ((GREEDY, 1, 0), (GREEDY, 2, 1), (SEEDED, 1, 2), (SEEDED, 2, 3))


def known(cuts: Sequence[tuple[int, int]], whole: Answer) -> list[worker_pb2.KnownOutput]:
    """From where to where the output of each choice is known."""
    return [
        worker_pb2.KnownOutput(choice=choice, token_ids=whole.tokens[choice][first:last])
        for choice, (first, last) in enumerate(cuts)
    ]


def rest(whole: Answer, cuts: Sequence[int]) -> tuple[list[list[int]], list[list[common_pb2.PositionLogprobs]]]:
    """What comes after the cuts."""
    tokens = [whole.tokens[choice][cut:] for choice, cut in enumerate(cuts)]
    return tokens, [whole.logprobs[choice][cut:] for choice, cut in enumerate(cuts)]


async def test_cut_output_goes_on_with_the_same_tokens(tmp_path: Path, valkey: Valkey) -> None:
    rng = random.Random(1)
    async with running_worker(tmp_path, valkey.url) as worker:
        stream = Stream(worker)
        for key, (sampling, choices, number) in enumerate(CASES):
            wanted: dict[str, Any] = {"sampling": sampling, "num_choices": choices}
            whole = await worker.generate(prompt(number), MAX_TOKENS, **UNCACHED, **wanted)
            assert [len(whole.tokens[choice]) for choice in range(choices)] == [MAX_TOKENS] * choices
            cut_at = (1, MAX_TOKENS - 1, *rng.sample(range(2, MAX_TOKENS - 1), 2))
            every = [[cut, *(rng.randrange(MAX_TOKENS) for _ in range(choices - 1))] for cut in cut_at]
            going_on = (_go_on(worker, number, wanted, whole, cuts, cached=i % 2 == 1) for i, cuts in enumerate(every))
            await asyncio.gather(*going_on)
            await _held(stream, 100 + key, number, wanted, whole, rng)
        await worker.wait_idle()


async def _go_on(
    worker: WorkerProcess, number: int, wanted: dict[str, Any], whole: Answer, cuts: list[int], *, cached: bool
) -> None:
    """Another attempt after the cuts draws the rest."""
    output, cache = known([(0, cut) for cut in cuts], whole), {} if cached else UNCACHED
    answer = await worker.generate(prompt(number), MAX_TOKENS, known=output, **cache, **wanted)
    tokens, logprobs = rest(whole, cuts)
    assert [answer.tokens[choice] for choice in range(len(cuts))] == tokens
    assert [answer.logprobs[choice] for choice in range(len(cuts))] == logprobs
    assert answer.completed is not None
    assert answer.completed.usage.output_tokens == MAX_TOKENS * len(cuts)
    assert answer.cached <= len(prompt(number))


async def _held(
    stream: Stream, first_key: int, number: int, wanted: dict[str, Any], whole: Answer, rng: random.Random
) -> None:
    """Held at random cuts, and resumed after more has become known, prepared or not."""
    choices = len(whole.tokens)
    for is_awaited in (True, False):
        key = first_key + 1000 * is_awaited
        splits = [sorted(rng.sample(range(MAX_TOKENS), 2)) for _ in range(choices)]
        begun = known([(0, first) for first, _ in splits], whole)
        await stream.start(key, prompt(number), MAX_TOKENS, known=begun, hold_s=120.0, **wanted)
        if is_awaited:
            await stream.read_until(lambda key=key: any(e.HasField("prepared") for e in stream.events.get(key, [])))
        further = known([(first, last) for first, last in splits], whole)
        await stream.resume(key, {one.choice: list(one.token_ids) for one in further})
        await stream.read_until(lambda key=key: key in stream.ends)
        assert stream.ends[key].code == 0
        tokens, logprobs = rest(whole, [last for _, last in splits])
        chunks = [event.tokens for event in stream.events[key] if event.HasField("tokens")]
        for choice in range(choices):
            own = [chunk for chunk in chunks if chunk.choice == choice]
            assert [token for chunk in own for token in chunk.token_ids] == tokens[choice]
            assert [logprob for chunk in own for logprob in chunk.logprobs] == logprobs[choice]
