"""`kvmesh worker`: the front process of one model replica. Parses, wires, serves."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import structlog
from kvmesh.v1 import worker_pb2, worker_pb2_grpc

from services.common.announcer import Announcer
from services.common.models import ModelSource, resolve_model
from services.common.process import generated_instance, stop_event, write_ready_file
from services.common.redis_client import RedisHealth, connect_redis
from services.common.registry import LocationRecord, Registrar, RegistryWatcher, new_epoch
from services.common.rpc import MeshServer
from services.common.security import MeshSecret, load_mesh_secret
from services.common.settings import ConfigurationError, exit_on_configuration_error, load_settings
from services.common.telemetry import process_telemetry
from services.worker.config import WorkerSettings, check_settings
from services.worker.errors import ChildDied, StartFailed
from services.worker.front import Front
from services.worker.load_board import LoadBoard
from services.worker.observation import WorkerMetrics
from services.worker.push_target import PushTargets
from services.worker.replica import Replica, host_name, identity_proto, location_record, start_replica
from services.worker.service import WorkerService
from services.worker.streams import StreamTable
from services.worker.target_keeper import TargetKeeper

# Time for the last responses and statuses to leave.
_STOP_GRACE_S = 1.0
_log = structlog.get_logger()
T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker; the exit status."""
    try:
        settings = load_settings(WorkerSettings, sys.argv[1:] if argv is None else argv)
        check_settings(settings)
        source = resolve_model(settings.model)
        secret = load_mesh_secret(settings)
        worker_id = settings.instance or generated_instance("worker")
        with process_telemetry(
            "worker", worker_id, level=settings.log_level, metrics_listen=settings.metrics_listen
        ) as metrics_address:
            return asyncio.run(_serve(settings, source, secret, worker_id, metrics_address))
    except ConfigurationError as error:
        return exit_on_configuration_error(error)
    except (StartFailed, RuntimeError) as error:
        sys.stderr.write(f"kvmesh: worker: {error}\n")
        return 1


async def _serve(
    settings: WorkerSettings, source: ModelSource, secret: MeshSecret, worker_id: str, metrics_address: str
) -> int:
    stop = stop_event()
    # Loading a model takes long; a taken port should not be found after it.
    _check_free(settings.listen)
    async with AsyncExitStack() as stack:
        start = start_replica(settings, source, secret, worker_id=worker_id, epoch=new_epoch(), stack=stack)
        replica = await _unless_stopped(start, stop)
        if replica is None:
            return 0
        server = _Server(settings, secret, replica, metrics_address)
        await server.start()
        stack.push_async_callback(server.stop)
        status = 0
        try:
            await server.run_until(stop)
        except* ChildDied as died:
            _log.error("the replica is gone", reason=str(died.exceptions[0]))
            status = 1
    return status


class _Server:
    """Everything around a started replica: gRPC, registry, announcements, the front."""

    def __init__(self, settings: WorkerSettings, secret: MeshSecret, replica: Replica, metrics_address: str) -> None:
        self._settings = settings
        self._replica = replica
        self._metrics_address = metrics_address
        self._redis = connect_redis(settings.redis_url)
        self._health = RedisHealth()
        self._announcer = Announcer(
            self._redis, kind="worker", location_id=replica.worker_id, epoch=replica.epoch, health=self._health
        )
        self._watcher = RegistryWatcher(self._redis, health=self._health)
        targets = PushTargets(worker_id=replica.worker_id, host=host_name(settings), ramp_s=settings.node_ramp_s)
        self._keeper = TargetKeeper(self._watcher, targets)
        board = LoadBoard()
        self._front = Front(
            replica.engine,
            replica.mover,
            board=board,
            streams=StreamTable(max_requests=settings.max_requests, stream_queue=settings.stream_queue),
            announcer=self._announcer,
            metrics=WorkerMetrics(board),
            child_silence_s=settings.child_silence_s,
            node_failing=self._keeper.failing,
        )
        self._service = WorkerService(
            self._front,
            identity_proto(replica, settings),
            default_deadline_s=settings.default_deadline_s,
            drain=self._stop_admitting,
        )
        self._grpc = MeshServer(settings.listen, secret=secret)
        name = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
        self._grpc.add(worker_pb2_grpc.add_WorkerServicer_to_server, self._service, name)

    async def start(self) -> None:
        """Listen. Raises RuntimeError when the address is taken."""
        await self._grpc.start(self._settings.advertise_host)

    async def run_until(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, then drain. Raises ChildDied in an ExceptionGroup when the replica is lost."""
        record = location_record(
            self._replica, self._settings, address=self._grpc.address, metrics=self._metrics_address
        )
        registrar = Registrar(self._redis, record, health=self._health)
        try:
            async with asyncio.TaskGroup() as group:
                runs = [self._front.run(), registrar.run(), self._announcer.run(), self._watcher.run()]
                if self._settings.push != "off":
                    runs.append(self._keeper.run(self._front.set_push_target))
                tasks = [group.create_task(run) for run in runs]
                await self._open(record)
                await stop.wait()
                await self._drain()
                for task in tasks:
                    task.cancel()
        finally:
            await self._grpc.set_ready(False)
            await registrar.close()
            await self._announcer.close()

    async def stop(self) -> None:
        """Let what has ended leave, and close."""
        self._service.close()
        await self._grpc.stop(_STOP_GRACE_S)
        await self._redis.aclose()

    async def _open(self, record: LocationRecord) -> None:
        self._front.board.ready = True
        await self._grpc.set_ready(True)
        children = [
            {"role": child.role, "pid": child.process.pid} for child in (self._replica.engine, self._replica.mover)
        ]
        write_ready_file(
            self._settings.ready_file, address=record.grpc_address, metrics=self._metrics_address, children=children
        )
        ready = self._replica.engine_ready
        _log.info(
            "worker ready",
            address=record.grpc_address,
            model=record.model,
            blocks=ready.num_blocks,
            context=ready.context_length,
            prefill_tokens_per_s=round(ready.prefill_tokens_per_s),
            decode_step_ms=round(ready.decode_step_s * 1000, 1),
        )

    async def _stop_admitting(self) -> None:
        await self._grpc.set_ready(False)
        self._front.drain()

    async def _drain(self) -> None:
        _log.info("draining", open_requests=len(self._front.streams))
        await self._stop_admitting()
        try:
            async with asyncio.timeout(self._settings.drain_deadline_s):
                await self._front.streams.wait_empty()
        except TimeoutError:
            _log.warning("drain deadline passed", open_requests=len(self._front.streams))
            self._front.streams.fail_all("UNAVAILABLE", "the worker is shutting down")


def _check_free(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_server((host.strip("[]"), int(port)), family=_family(host)):
            pass
    except (OSError, ValueError) as error:
        raise StartFailed(f"cannot listen on {address}: {error}") from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


async def _unless_stopped(start: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """The result of `start`; None when `stop` was set before, `start` being cancelled then."""
    task, stopped = asyncio.create_task(start), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for pending in (task, stopped):
            pending.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


if __name__ == "__main__":
    sys.exit(main())
