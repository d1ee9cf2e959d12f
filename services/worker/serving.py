"""One loaded replica while it serves: registered, announced, attached to the gRPC service, drained in the end.

What outlives a model (gRPC server, Redis connection, metrics) belongs to the worker and comes in as `Surroundings`.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import structlog

from services.common.announcer import Announcer
from services.common.process import write_ready_file
from services.common.redis_client import RedisClient, RedisHealth
from services.common.registry import Registrar, RegistryWatcher
from services.common.rpc import MeshServer
from services.worker.config import WorkerSettings
from services.worker.front import Front
from services.worker.kept_streams import KeptStreams
from services.worker.load_board import LoadBoard
from services.worker.observation import WorkerMetrics
from services.worker.push_target import PushTargets
from services.worker.replica import Replica, host_name, identity_proto, location_record
from services.worker.service import WorkerService
from services.worker.streams import StreamTable
from services.worker.target_keeper import TargetKeeper

# A reader that is asked to go on elsewhere keeps others from being asked so long at most: all have been asked before
# half of the drain's time is over.
_MAX_DEPARTURE_S, _DEPARTURE_SHARE = 1.0, 1 / 16
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a worker has, with a model or without."""

    settings: WorkerSettings
    grpc: MeshServer
    service: WorkerService
    redis: RedisClient
    health: RedisHealth
    watcher: RegistryWatcher
    board: LoadBoard
    metrics: WorkerMetrics
    metrics_address: str


class Serving:
    """A replica from its first admission to its last."""

    def __init__(self, around: Surroundings, replica: Replica) -> None:
        settings = around.settings
        self._around = around
        self._replica = replica
        self._drain_within_s = settings.drain_deadline_s
        self._announcer = Announcer(
            around.redis, kind="worker", location_id=replica.worker_id, epoch=replica.epoch, health=around.health
        )
        targets = PushTargets(worker_id=replica.worker_id, host=host_name(settings), ramp_s=settings.node_ramp_s)
        self._keeper = TargetKeeper(around.watcher, targets)
        around.board.reset(time.monotonic())
        self._kept = KeptStreams(max_kept=settings.max_kept_requests)
        self.front = Front(
            replica.engine,
            replica.mover,
            board=around.board,
            streams=StreamTable(max_requests=settings.max_requests, stream_queue=settings.stream_queue),
            announcer=self._announcer,
            metrics=around.metrics,
            child_silence_s=settings.child_silence_s,
            departure_s=min(_MAX_DEPARTURE_S, settings.drain_deadline_s * _DEPARTURE_SHARE),
            node_failing=self._keeper.failing,
            ranks=replica.ranks,
            is_exact=settings.is_exact,
        )

    async def run_until(self, end: asyncio.Event) -> None:
        """Serve until `end`, then drain. Raises ChildDied in an ExceptionGroup when the replica is lost."""
        around = self._around
        record = location_record(
            self._replica, around.settings, address=around.grpc.address, metrics=around.metrics_address
        )
        registrar = Registrar(around.redis, record, health=around.health)
        try:
            async with asyncio.TaskGroup() as group:
                runs = [self.front.run(), registrar.run(), self._announcer.run()]
                if around.settings.pushes_blocks:
                    runs.append(self._keeper.run(self.front.set_push_target))
                tasks = [group.create_task(run) for run in runs]
                await self._open()
                await end.wait()
                await self._drain()
                for task in tasks:
                    task.cancel()
        finally:
            await around.grpc.set_ready(False)
            await registrar.close()
            await self._announcer.close()
            self._keeper.close()

    async def stop_admitting(self) -> None:
        """Readiness off, no more requests; open ones go on."""
        await self._around.grpc.set_ready(False)
        self.front.drain()

    def drain_within(self, seconds: float) -> None:
        """Drain no longer than this; `drain_deadline_s` where that is shorter. Of a drain that has not begun."""
        self._drain_within_s = min(self._drain_within_s, seconds)

    async def _open(self) -> None:
        around, replica = self._around, self._replica
        around.service.attach(self.front, identity_proto(replica, around.settings), self._kept)
        around.board.ready = True
        await around.grpc.set_ready(True)
        tell_ready(around, [{"role": role, "pid": pid} for role, pid in replica.child_pids.items()])
        ready = replica.engine_ready
        _log.info(
            "worker ready",
            address=around.grpc.address,
            model=replica.source.name,
            blocks=ready.num_blocks,
            context=ready.context_length,
            prefill_tokens_per_s=round(ready.prefill_tokens_per_s),
            decode_step_ms=round(ready.decode_step_s * 1000, 1),
        )

    async def _drain(self) -> None:
        _log.info("draining", open_requests=len(self.front.streams))
        await self.stop_admitting()
        self._kept.drain()
        try:
            async with asyncio.timeout(self._drain_within_s):
                await self.front.streams.wait_empty()
        except TimeoutError:
            _log.warning("drain deadline passed", open_requests=len(self.front.streams))
            self.front.streams.fail_all("UNAVAILABLE", "the worker is shutting down")


def tell_ready(around: Surroundings, children: list[dict[str, object]]) -> None:
    """Write the ready file: where the worker listens, and its children if it has a model."""
    write_ready_file(
        around.settings.ready_file, address=around.grpc.address, metrics=around.metrics_address, children=children
    )
