"""Two real routers, one Valkey: what one grants, the other knows."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from services.common.redis_client import connect_redis
from tests.router.fake_worker import FakeWorker
from tests.router.test_router import SECRET, RouterProcess, chain, router
from tests.support.valkey import Valkey
from tests.support.waiting import eventually_async

Pair = tuple[RouterProcess, RouterProcess]


@pytest.fixture
async def workers(valkey: Valkey) -> AsyncIterator[list[FakeWorker]]:
    client = connect_redis(valkey.url)
    workers = [FakeWorker(client, SECRET, name) for name in ("a", "b")]
    for worker in workers:
        await worker.start()
    yield workers
    for worker in workers:
        await worker.stop()
    await client.aclose()


@pytest.fixture
async def pair(tmp_path: Path, valkey: Valkey, workers: list[FakeWorker]) -> AsyncIterator[Pair]:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    async with AsyncExitStack() as stack:
        # Longer than any of these tests: what is pending goes for a reason.
        flags = (valkey.url, "--pending-timeout-s", "600")
        one, two = [await stack.enter_async_context(router(folder, *flags)) for folder in folders]
        await one.workers_ready(2)
        await two.workers_ready(2)
        yield one, two


async def pending(process: RouterProcess) -> dict[str, int]:
    return {view.worker_id: view.pending_attempts for view in (await process.describe()).workers}


async def until_pending(process: RouterProcess, count: int) -> None:
    async def there() -> bool:
        return sum((await pending(process)).values()) == count

    await eventually_async(there, every_s=0.002)


async def test_a_grant_reaches_the_other_router_and_leaves_it_when_closed(
    pair: Pair, workers: list[FakeWorker]
) -> None:
    one, two = pair
    stream = one.route()
    grants = [(await stream.ask(chain(2))).grant for _ in range(3)]
    await until_pending(two, 3)
    assert await pending(two) == Counter(grant.worker_id for grant in grants) | Counter(a=0, b=0)
    await stream.done(grants[0])
    await until_pending(two, 2)
    for worker in workers:
        worker.admit(f"{grants[1].request_id}/1")
    await until_pending(one, 1)
    await until_pending(two, 1)
    stream.call.cancel()


async def test_a_burst_over_two_routers_is_not_admitted_twice(pair: Pair) -> None:
    """Each worker's queue holds 200 ms, which are 400 tokens at its speed, granted by whomever; twice that alone."""
    streams = [process.route() for process in pair]
    granted = 0
    for turn in range(20):
        answer = await streams[turn % 2].ask(chain(6), request_id=f"burst-{turn}")
        if answer.HasField("grant"):
            granted += 1
            await until_pending(pair[1 - turn % 2], granted)
    # 99 tokens each: the fifth finds 396 before it at the latest.
    assert 6 <= granted <= 10
    for stream in streams:
        stream.call.cancel()


async def test_without_redis_routers_go_on_alone(pair: Pair, valkey: Valkey) -> None:
    one, two = pair
    valkey.kill()
    streams = [one.route(), two.route()]
    for stream in streams:
        assert (await stream.ask(chain(1))).HasField("grant")
    assert sum((await pending(one)).values()) == sum((await pending(two)).values()) == 1
    valkey.start()

    async def told() -> bool:
        assert (await streams[0].ask(chain(1))).HasField("grant")
        await asyncio.sleep(0.02)
        return sum((await pending(two)).values()) > 1

    await eventually_async(told)
    for stream in streams:
        stream.call.cancel()
