"""Places of a rank host: bounded, given way to later replicas, ended once and for one reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

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
    await places.leaving.wait()
    first.end("told")
    with pytest.raises(Refused, match="stopping"):
        take(places, Rank(), number=3)
    await leaving
    assert goes.ended
    assert stays.ended
    assert second.gone.is_set()


async def test_a_worker_that_says_nothing_or_closes_its_side_ends_its_rank() -> None:
    async def nothing() -> AsyncIterator[object]:
        yield object()
        await asyncio.Event().wait()

    async def closes() -> AsyncIterator[object]:
        yield object()

    places = Places(2)
    for beats, silence_s in ((nothing(), 0.01), (closes(), PATIENCE_S)):
        rank = Rank()
        place = take(places, rank)
        await place.watch(beats, silence_s)
        await place.gone.wait()
        assert rank.ended
