"""The ranks of a rank host: how many there may be, what ends one, and who gives way to whom.

A place is one call's. Its keeper, a task that no cancelled call takes along, starts the rank, waits until the place is
over, and ends the rank. A worker that comes again with a later epoch has lost its former replica: the rank of that
gives way, and has ended before the new one starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import structlog
from kvmesh.v1 import rank_host_pb2
from opentelemetry import metrics

from services.worker.errors import Refused
from services.worker.rank_host.hosted_rank import HostedRank

_meter = metrics.get_meter("kvmesh.rank_host")
_running = _meter.create_up_down_counter("kvmesh_rank_host_ranks", description="Ranks that run here.")
_ends = _meter.create_counter("kvmesh_rank_host_ends", description="Ranks that have ended, by reason.")
_log = structlog.get_logger()


class Place:
    """started: the rank, or Refused. gone: it has ended, or there was none."""

    def __init__(self, name: str, epoch: int) -> None:
        self.name = name
        self.epoch = epoch
        self.started: asyncio.Future[HostedRank] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()
        self._over = asyncio.Event()
        self._reason = ""

    def end(self, reason: str) -> None:
        """Have the rank end; the first reason is the one that counts."""
        self._reason = self._reason or reason
        self._over.set()

    async def watch(self, controls: AsyncIterator[rank_host_pb2.RankControl], silence_s: float) -> None:
        """End the rank when its worker says so, is gone, or says nothing for too long."""
        try:
            while True:
                async with asyncio.timeout(silence_s):
                    control = await anext(controls)
                if control.WhichOneof("control") == "end":
                    self.end("told")
                    return
        except StopAsyncIteration:
            # A call that breaks ends so too.
            self.end("call broke")
        except TimeoutError:
            self.end("silence")

    async def keep(self, launch: Callable[[], Awaitable[HostedRank]], before: Place | None) -> None:
        """From the start of the rank to its end."""
        try:
            if before is not None:
                before.end("replaced")
                await before.gone.wait()
            rank = await launch()
        except Refused as refusal:
            self._refuse(refusal)
            return
        except Exception as error:
            _log.exception("a rank cannot be started", rank=self.name)
            self._refuse(Refused("INTERNAL", f"the rank cannot be started: {type(error).__name__}"))
            return
        _running.add(1)
        _log.info("rank started", rank=self.name)
        self.started.set_result(rank)
        try:
            await self._over.wait()
            await rank.end()
        finally:
            _running.add(-1)
        _ends.add(1, {"reason": self._reason})
        _log.info("rank ended", rank=self.name, reason=self._reason)

    def _refuse(self, refusal: Refused) -> None:
        self.started.set_exception(refusal)
        # A call that is over does not ask.
        self.started.exception()


class Places:
    """At most `max_ranks` of them. leaving: has the seconds that are left to the ranks once the host is to stop."""

    def __init__(self, max_ranks: int) -> None:
        self.leaving: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._max_ranks = max_ranks
        self._places: dict[tuple[str, int], Place] = {}
        self._keepers: set[asyncio.Task[None]] = set()

    def take(self, worker_id: str, rank: int, epoch: int, launch: Callable[[], Awaitable[HostedRank]]) -> Place:
        """A place whose rank `launch` starts. Raises Refused."""
        key = worker_id, rank
        before = self._places.get(key)
        if self.leaving.done():
            raise Refused("UNAVAILABLE", "the rank host is stopping")
        if before is not None and before.epoch >= epoch:
            raise Refused("FAILED_PRECONDITION", f"rank {rank} of {worker_id} is that of a later replica")
        if before is None and len(self._places) >= self._max_ranks:
            raise Refused("RESOURCE_EXHAUSTED", f"max_ranks={self._max_ranks}: as many run here")
        place = self._places[key] = Place(f"{worker_id}/{rank}", epoch)
        keeper = asyncio.create_task(self._keep(key, place, launch, before))
        self._keepers.add(keeper)
        keeper.add_done_callback(self._keepers.discard)
        return place

    async def leave(self, within_s: float) -> None:
        """Take no more, ask the workers to drain, and end what is left then."""
        self.leaving.set_result(within_s)
        if self._keepers:
            await asyncio.wait(self._keepers, timeout=within_s)
        for place in self._places.values():
            place.end("stopped")
        await asyncio.gather(*self._keepers)

    async def _keep(
        self,
        key: tuple[str, int],
        place: Place,
        launch: Callable[[], Awaitable[HostedRank]],
        before: Place | None,
    ) -> None:
        try:
            await place.keep(launch, before)
        finally:
            if self._places.get(key) is place:
                del self._places[key]
            place.gone.set()
