"""Keeps the worker's push target current: follows the registry, hears of failures, probes nodes that were left."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry import metrics

from services.common.registry import LocationRecord, RegistryChange, RegistryWatcher
from services.common.rpc import open_channel
from services.worker.engine_messages import PushTarget
from services.worker.mover_messages import NodeFailing
from services.worker.push_target import PushTargets

# How often weights that grow are looked at; a change in the registry counts at once.
_LOOK_EVERY_S = 1.0
_PROBE_TIMEOUT_S = 0.5
_log = structlog.get_logger()
_meter = metrics.get_meter("kvmesh.worker")
_left = _meter.create_counter("kvmesh_worker_left_nodes", description="Times that a kvstore node was left for failing.")
_returned = _meter.create_counter("kvmesh_worker_returned_nodes", description="Times that such a node was taken back.")


class TargetKeeper:
    """`run` until cancelled; every choice goes to the `tell` given there."""

    def __init__(self, watcher: RegistryWatcher, targets: PushTargets) -> None:
        self._watcher = watcher
        self._targets = targets
        self._wake = asyncio.Event()
        watcher.subscribe(self._changed)

    def close(self) -> None:
        """Follow the registry no longer. Idempotent."""
        self._watcher.unsubscribe(self._changed)

    def failing(self, message: NodeFailing) -> None:
        """Pulls from or pushes to a node failed repeatedly."""
        record = self._watcher.records.get(f"kvstore/{message.location_id}")
        if record is None or record.epoch != message.epoch:
            return
        if self._targets.leave(record.id, record.epoch, time.time()):
            _left.add(1)
            _log.warning("a kvstore node is left", kvstore_id=record.id, address=record.grpc_address)
            self._wake.set()

    async def run(self, tell: Callable[[PushTarget], None]) -> None:
        """Choose whenever something changes, and as weights grow."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._probe())
            while True:
                self._wake.clear()
                tell(self._targets.choose(self._watcher.records.values(), time.time()))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_EVERY_S):
                        await self._wake.wait()

    def _changed(self, _: RegistryChange) -> None:
        self._wake.set()

    async def _probe(self) -> None:
        while True:
            for record in self._targets.due(self._watcher.records.values(), time.time()):
                alive = await _serves(record)
                self._targets.probed(record, time.time(), alive=alive)
                if alive:
                    _returned.add(1)
                    _log.info("a kvstore node is back", kvstore_id=record.id)
                    self._wake.set()
            await asyncio.sleep(_LOOK_EVERY_S)


async def _serves(record: LocationRecord) -> bool:
    """Whether the node says that it serves."""
    try:
        async with open_channel(record.grpc_address) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=_PROBE_TIMEOUT_S
            )
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
