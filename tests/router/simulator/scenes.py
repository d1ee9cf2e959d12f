"""Small traces and workers for tests of the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from services.common.blocks import BlockId
from services.common.time_model import TimeModel
from services.router.simulator.job import Job, WorkerProfile
from services.router.simulator.scenario import Scenario
from services.router.simulator.trace import Trace, TraceRequest

BLOCK = 16
SMALL = WorkerProfile(
    TimeModel(20_000.0, 0.008, 0.000_05),
    cached_tokens=4096,
    block_tokens=BLOCK,
    step_token_budget=256,
    max_running=32,
    max_queue_s=0.2,
)


def block_ids(name: int, count: int) -> tuple[BlockId, ...]:
    """The prefix chain of one document."""
    return tuple(BlockId(name.to_bytes(8, "little") + at.to_bytes(8, "little")) for at in range(count))


def job(name: int, prompt_tokens: int, output_tokens: int, *, key: object = None) -> Job:
    return Job(
        key=name if key is None else key,  # type: ignore[arg-type]
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        block_ids=block_ids(name, prompt_tokens // BLOCK),
    )


def trace(requests: Sequence[TraceRequest]) -> Trace:
    return Trace(tuple(sorted(requests, key=lambda request: request.arrival_s)), BLOCK)


def random_trace(seed: int, count: int, *, rate: float, documents: int = 8) -> Trace:
    """Prompts that extend one of a few documents, at random times."""
    random = Random(seed)
    requests, now_s = [], 0.0
    for _ in range(count):
        now_s += random.expovariate(rate)
        shared = block_ids(random.randrange(documents), random.randrange(1, 40))
        own = block_ids(1000 + random.randrange(1 << 40), random.randrange(0, 20))
        ids = (*shared, *own)
        tokens = len(ids) * BLOCK + random.randrange(BLOCK)
        requests.append(TraceRequest(now_s, tokens, random.randrange(1, 60), ids))
    return trace(requests)


def scenario(**fields: object) -> Scenario:
    values: dict[str, object] = {"num_workers": 4, "policy": "predicted_ttft", "max_queue_s": 30.0} | fields
    return Scenario(profile=SMALL, **values)  # type: ignore[arg-type]
