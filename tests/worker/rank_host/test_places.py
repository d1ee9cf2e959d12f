"""Places of a rank host: bounded, given way to later replicas, ended once and for one reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest
from kvmesh.v1 import rank_host_pb2
from structlog.testing import capture_logs

from services.worker.errors import Refused
from services.worker.rank_host.hosted_rank import HostedRank
from services.worker.rank_host.places import Place, Places
from tests.support.waiting import PATIENCE_S, eventually


class Rank:
    """Its end can be held up."""

    def __init__(self) -> None:
        self.ended = False
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def end(self) -> None:
        await self.may_end.wait()
        self.ended = True


async def launched(rank: Rank) -> HostedRank:
    return cast(HostedRank, rank)


def take(places: Places, rank: Rank, *, number: int = 1, epoch: int = 1, worker: str = "w") -> Place:
    return places.take(worker, number, epoch, lambda: launched(rank))


async def test_a_later_replica_waits_for_the_end_of_the_former_ones_rank() -> None:
    places, former, later = Places(1), Rank(), Rank()
    first = take(places, former)
    await first.started
    former.may_end.clear()
    second = take(places, later, epoch=2)
    with pytest.raises(Refused, match="rank 1 of w is that of a later replica"):
        take(places, Rank(), epoch=2)
    assert not second.started.done()
    former.may_end.set()
    assert await second.started is cast(Any, later)
    assert former.ended
    second.end("told")
    await second.gone.wait()
    await take(places, Rank()).started


async def test_there_are_no_more_than_there_may_be() -> None:
    places = Places(2)
    kept = [take(places, Rank(), number=number) for number in (1, 2)]
    with pytest.raises(Refused, match="max_ranks=2"):
        take(places, Rank(), number=3)
    kept[0].end("told")
    await kept[0].gone.wait()
    await take(places, Rank(), number=3).started


async def test_a_rank_that_cannot_be_started_leaves_no_place() -> None:
    async def refused() -> HostedRank:
        raise Refused("UNAVAILABLE", "cannot reach the worker")

    async def failed() -> HostedRank:
        raise OSError("no process")

    places = Places(1)
    for launch, message in ((refused, "cannot reach the worker"), (failed, "cannot be started: OSError")):
        place = places.take("w", 1, 1, launch)
        with pytest.raises(Refused, match=message):
            await place.started
        await place.gone.wait()
    await take(places, Rank()).started


async def test_a_place_that_is_over_before_its_rank_is_there_ends_it() -> None:
    places, rank = Places(1), Rank()
    take(places, rank).end("call broke")
    await eventually(lambda: rank.ended)


async def test_leaving_asks_first_and_ends_what_is_left() -> None:
    places, goes, stays = Places(2), Rank(), Rank()
    first, second = take(places, goes, number=1), take(places, stays, number=2)
    leaving = asyncio.create_task(places.leave(0.05))
    assert await asyncio.shield(places.leaving) == 0.05
    first.end("told")
    with pytest.raises(Refused, match="stopping"):
        take(places, Rank(), number=3)
    await leaving
    assert goes.ended
    assert stays.ended
    assert second.gone.is_set()


BEAT = rank_host_pb2.RankControl(beat=rank_host_pb2.RankBeat())


async def says_nothing() -> AsyncIterator[rank_host_pb2.RankControl]:
    yield BEAT
    await asyncio.Event().wait()


async def breaks() -> AsyncIterator[rank_host_pb2.RankControl]:
    yield BEAT


async def says_end() -> AsyncIterator[rank_host_pb2.RankControl]:
    yield BEAT
    yield rank_host_pb2.RankControl(end=rank_host_pb2.RankEnd())
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("controls", "silence_s", "reason"),
    [(says_nothing, 0.01, "silence"), (breaks, PATIENCE_S, "call broke"), (says_end, PATIENCE_S, "told")],
)
async def test_a_rank_ends_with_its_worker_for_a_reason(
    controls: Callable[[], AsyncIterator[rank_host_pb2.RankControl]], silence_s: float, reason: str
) -> None:
    rank = Rank()
    place = take(Places(1), rank)
    with capture_logs() as logged:
        async with asyncio.timeout(PATIENCE_S):
            await place.watch(controls(), silence_s)
            await place.gone.wait()
    assert rank.ended
    assert [event["reason"] for event in logged if event["event"] == "rank ended"] == [reason]
