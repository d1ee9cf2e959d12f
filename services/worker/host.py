"""A worker process with a model or without: gRPC server, Redis, metrics, artifacts for others, the slot for a model.

It listens from its start, so that a model on its way can be watched and what is in its cache be fetched by others;
health says NOT_SERVING until a model is ready.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import structlog
from kvmesh.v1 import (
    artifacts_pb2,
    artifacts_pb2_grpc,
    worker_control_pb2,
    worker_control_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

from services.common.artifacts.cache import ModelCache
from services.common.keys import KeySpace
from services.common.models import ModelSource
from services.common.redis_client import RedisHealth, connect_redis
from services.common.registry import RegistryWatcher
from services.common.rpc import MeshServer
from services.common.security import MeshSecret
from services.worker.artifacts.leases import SharedPlaces
from services.worker.artifacts.service import ArtifactService
from services.worker.artifacts.store import ModelStore
from services.worker.config import WorkerSettings
from services.worker.control import ControlService
from services.worker.errors import StartFailed
from services.worker.load_board import LoadBoard
from services.worker.observation import WorkerMetrics
from services.worker.service import WorkerService
from services.worker.serving import Surroundings, tell_ready
from services.worker.slot import ModelSlot

_log = structlog.get_logger()

# Time for the last responses and statuses to leave.
_STOP_GRACE_S = 1.0


class WorkerHost:
    """`start`, `run` until a stop signal, `stop`."""

    def __init__(self, settings: WorkerSettings, secret: MeshSecret, worker_id: str, metrics_address: str) -> None:
        """Raises ArtifactError when the model cache cannot be used."""
        redis, health, board = connect_redis(settings.redis_url), RedisHealth(), LoadBoard()
        grpc = MeshServer(settings.listen, secret=secret)
        service = WorkerService(default_deadline_s=settings.default_deadline_s, drain=self._stop_admitting)
        self._around = Surroundings(
            settings=settings,
            grpc=grpc,
            service=service,
            redis=redis,
            health=health,
            watcher=RegistryWatcher(redis, health=health),
            board=board,
            metrics=WorkerMetrics(board),
            metrics_address=metrics_address,
        )
        folder = settings.model_cache_dir
        cache = None if folder is None else ModelCache(folder.expanduser().absolute(), settings.model_cache_bytes)
        store = ModelStore(
            cache,
            SharedPlaces(redis, KeySpace().artifacts(), lambda: grpc.address),
            secret,
            source_readers=settings.model_source_readers,
            copy_timeout_s=settings.model_copy_timeout_s,
        )
        self._slot = ModelSlot(self._around, store, secret, worker_id)
        serves = ArtifactService(cache, max_serves=settings.model_peer_serves)
        self._add(worker_pb2, worker_pb2_grpc.add_WorkerServicer_to_server, service)
        self._add(
            worker_control_pb2,
            worker_control_pb2_grpc.add_WorkerControlServicer_to_server,
            ControlService(self._slot, worker_id),
        )
        self._add(artifacts_pb2, artifacts_pb2_grpc.add_ArtifactsServicer_to_server, serves)

    async def start(self) -> None:
        """Listen. Raises StartFailed when the address is taken, before gRPC's library would write lines about it."""
        _check_free(self._around.settings.listen)
        await self._around.grpc.start(self._around.settings.advertise_host)

    async def run(self, source: ModelSource | None, stop: asyncio.Event) -> None:
        """Have `source`, or wait to be told a model, until `stop`.

        Raises an ExceptionGroup: of StartFailed when `source` cannot be loaded, of ChildDied when a replica is lost.
        """
        if source is None:
            tell_ready(self._around, [])
            _log.info("waiting for a model", address=self._around.grpc.address, metrics=self._around.metrics_address)
        else:
            self._slot.load(source)
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._around.watcher.run())
            closing = group.create_task(self._close_at(stop))
            await self._slot.run(required=source is not None)
            watching.cancel()
            closing.cancel()

    async def stop(self) -> None:
        """Let what has ended leave, and close."""
        self._around.service.detach()
        await self._around.grpc.stop(_STOP_GRACE_S)
        await self._around.redis.aclose()

    def _add(self, module: Any, register: Callable[[Any, Any], None], servicer: object) -> None:
        (name,) = (service.full_name for service in module.DESCRIPTOR.services_by_name.values())
        self._around.grpc.add(register, servicer, name)

    async def _close_at(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._slot.close()

    async def _stop_admitting(self) -> None:
        await self._slot.stop_admitting()


def _check_free(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_server((host.strip("[]"), int(port)), family=_family(host)):
            pass
    except (OSError, ValueError) as error:
        raise StartFailed(f"cannot listen on {address}: {error}") from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
