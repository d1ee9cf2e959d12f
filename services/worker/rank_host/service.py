"""The RankHost service: what a worker asks for, checked and completed with what this host knows better."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping

import grpc
import grpc.aio
import msgspec
import structlog
from kvmesh.v1 import rank_host_pb2, rank_host_pb2_grpc
from opentelemetry import metrics

from services.common.models import ModelSource
from services.common.release import RELEASE
from services.worker.engine.config import EngineConfig
from services.worker.errors import Refused
from services.worker.rank_calls import call_worker
from services.worker.rank_host.config import RankHostSettings
from services.worker.rank_host.hosted_rank import HostedRank
from services.worker.rank_host.places import Places

_FIRST_TIMEOUT_S = 10.0
_CALL_TIMEOUT_S = 5.0
_refusals = metrics.get_meter("kvmesh.rank_host").create_counter(
    "kvmesh_rank_host_refusals", description="Ranks that were not started, by status."
)
_log = structlog.get_logger()
_Controls = AsyncIterator[rank_host_pb2.RankControl]
_Context = grpc.aio.ServicerContext[rank_host_pb2.RankControl, rank_host_pb2.RankEvent]


class RankHostService(rank_host_pb2_grpc.RankHostServicer):
    """Run, for several ranks at once."""

    def __init__(
        self, settings: RankHostSettings, sources: Mapping[str, ModelSource], places: Places, own_host: str
    ) -> None:
        """sources: the models here, by name. own_host: by which other ranks reach those here."""
        self._settings = settings
        self._sources = sources
        self._places = places
        self._own_host = own_host

    async def Run(self, request_iterator: _Controls, context: _Context) -> AsyncIterator[rank_host_pb2.RankEvent]:
        """See the protocol."""
        try:
            start = await _first(request_iterator)
            config = self._completed(start)
            place = self._places.take(
                start.worker_id, start.rank, start.epoch, lambda: _launch(start, config, self._places.leaving)
            )
            # A call that is cancelled may never come back to this generator.
            context.add_done_callback(lambda _: place.end("call broke"))  # type: ignore[arg-type]
            rank = await asyncio.shield(place.started)
        except Refused as refusal:
            _refusals.add(1, {"status": refusal.code})
            _log.warning("a rank is not started", code=refusal.code, detail=refusal.detail)
            await context.abort(grpc.StatusCode[refusal.code], refusal.detail)
            return
        watching = asyncio.create_task(place.watch(request_iterator, start.silence_s))
        context.add_done_callback(lambda _: watching.cancel())  # type: ignore[arg-type]
        async for event in rank.events():
            yield event
        place.end("died")

    def _completed(self, start: rank_host_pb2.StartRank) -> EngineConfig:
        """What the rank is told. Raises Refused."""
        if start.release != RELEASE:
            raise Refused("FAILED_PRECONDITION", f"release {RELEASE} runs here, {start.release[:32]!r} at the worker")
        source = self._sources.get(start.model)
        if source is None:
            known = ", ".join(sorted(self._sources))
            raise Refused("NOT_FOUND", f"model {start.model[:80]!r} is not here; models: {known}")
        try:
            config = msgspec.json.decode(start.engine_config, type=EngineConfig)
        except msgspec.MsgspecError as error:
            raise Refused("INVALID_ARGUMENT", f"engine_config: {error}") from None
        place = config.ranks
        if place is None or place.spread is None or place.rank != start.rank or not place.rank:
            raise Refused("INVALID_ARGUMENT", "engine_config: not of this rank of a spread group")
        if not start.silence_s > 0 or not start.host_ranks:
            raise Refused("INVALID_ARGUMENT", "silence_s, host_ranks: above 0")
        spread = msgspec.structs.replace(place.spread, own_host=self._own_host)
        return msgspec.structs.replace(
            config,
            instance=f"{start.worker_id}/rank{start.rank}",
            log_level=self._settings.log_level,
            model_path=str(source.path),
            threads=max(1, (self._settings.threads or os.cpu_count() or 1) // start.host_ranks),
            mover_fd=-1,
            pool_fd=-1,
            ranks=msgspec.structs.replace(place, spread=spread, store_fd=-1),
        )


async def _first(controls: _Controls) -> rank_host_pb2.StartRank:
    try:
        async with asyncio.timeout(_FIRST_TIMEOUT_S):
            control = await anext(controls)
    except (TimeoutError, StopAsyncIteration):
        raise Refused("INVALID_ARGUMENT", "the call begins with no start") from None
    if control.WhichOneof("control") != "start":
        raise Refused("INVALID_ARGUMENT", "the call begins with no start")
    return control.start


async def _launch(start: rank_host_pb2.StartRank, config: EngineConfig, leaving: asyncio.Future[float]) -> HostedRank:
    try:
        link = await call_worker(start.steps_address, start.token, start.rank, _CALL_TIMEOUT_S)
    except (OSError, ValueError, TimeoutError) as error:
        reason = str(error) or f"no answer in {_CALL_TIMEOUT_S:.0f} s"
        raise Refused("UNAVAILABLE", f"cannot reach the worker at {start.steps_address}: {reason}") from None
    return await HostedRank.start(f"rank{start.rank}", config, link, leaving)
