"""How a front waits for the ranks of its replica."""

from __future__ import annotations

import asyncio

import pytest

from services.common.settings import ConfigurationError
from services.worker.config import WorkerSettings, check_settings
from services.worker.errors import StartFailed
from services.worker.ranks import rank_threads, together, unless_leaving
from services.worker.remote_rank import Leaving


async def ready(value: int) -> int:
    return value


async def fails(kind: str, after: asyncio.Event | None = None, then: asyncio.Event | None = None) -> int:
    if after is not None:
        await after.wait()
    if then is not None:
        then.set()
    raise StartFailed(f"because of {kind}", kind)


async def test_all_are_ready() -> None:
    assert await together(ready(1), ready(2), ready(3)) == [1, 2, 3]


async def test_the_cause_is_told_and_not_what_followed_from_it() -> None:
    noticed, cancelled = asyncio.Event(), asyncio.Event()

    async def waits() -> int:
        try:
            return await asyncio.sleep(3600, 1)
        finally:
            cancelled.set()

    with pytest.raises(StartFailed, match="because of InvalidWeights"):
        await together(fails("RankLost", then=noticed), fails("InvalidWeights", after=noticed))
    with pytest.raises(StartFailed, match="because of InvalidWeights"):
        await together(fails("InvalidWeights"), fails("RankLost"), waits())
    assert cancelled.is_set()


async def test_a_lost_rank_is_the_cause_where_there_is_no_other() -> None:
    with pytest.raises(StartFailed, match="because of RankLost"):
        await together(fails("RankLost"), fails("RankLost"))


async def test_a_rank_host_that_is_to_stop_ends_the_start() -> None:
    leaving, cancelled = Leaving(), asyncio.Event()

    async def loads() -> int:
        leaving.tell("h:1", 30.0)
        leaving.tell("h:2", 20.0)
        try:
            return await asyncio.sleep(3600, 1)
        finally:
            cancelled.set()

    with pytest.raises(StartFailed, match="rank host h:1 is stopping"):
        await unless_leaving(leaving, loads())
    assert cancelled.is_set()
    assert await leaving.wait() == 30.0
    assert await unless_leaving(Leaving(), ready(1)) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor_parallel": 2, "device": "cuda"}, "tensor_parallel=2: needs device='cpu'"),
        ({"pipeline_parallel": 2, "staging_bytes": 2**20}, "pipeline_parallel=2: the ranks compute in the shared pool"),
        ({"expert_parallel": 2, "weight_dtype": "int8"}, "expert_parallel=2: needs weight_dtype='dtype'"),
        ({"tensor_parallel": 16, "pipeline_parallel": 8}, "tensor_parallel=16: 128 processes in all"),
        ({"tensor_parallel": 2, "max_adapters": 4}, "tensor_parallel=2: max_adapters=4: adapters are served by one"),
        ({"pipeline_parallel": 2, "pooling": "mean"}, "pooling='mean': needs pipeline_parallel=1"),
        ({"tensor_parallel": 2, "engine": "sim"}, "tensor_parallel=2: a simulated worker has no such thing"),
    ],
)
def test_groups_that_cannot_be(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_settings(WorkerSettings(**given))


def test_threads_are_shared_out() -> None:
    check_settings(WorkerSettings(pipeline_parallel=2, weight_dtype="int8"))
    assert rank_threads(WorkerSettings(tensor_parallel=2, pipeline_parallel=2, threads=9)) == 2
    assert rank_threads(WorkerSettings(tensor_parallel=2, threads=1)) == 1
