"""Watching workers that are not what their record says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from kvmesh.v1 import worker_pb2_grpc
from structlog.testing import capture_logs
from structlog.typing import EventDict

from services.common.redis_client import connect_redis
from services.common.registry import LocationRecord, RegistryChange
from services.common.rpc import MeshServer
from services.common.security import MeshSecret
from services.router.watch import WorkerWatcher
from services.router.workers import WorkerTable
from tests.router.fake_worker import FakeWorker
from tests.support.waiting import eventually

SECRET = MeshSecret("a secret of the mesh")
UNREACHABLE = "127.0.0.1:1"


@contextmanager
def watching(record: LocationRecord) -> Iterator[list[EventDict]]:
    """Log lines of a watcher that has learned of `record`."""
    watcher = WorkerWatcher(WorkerTable(pending_timeout_s=5.0), SECRET, lambda: None)
    watcher.registry_changed(RegistryChange(record))
    with capture_logs() as lines:
        task = asyncio.create_task(watcher.run())
        try:
            yield lines
        finally:
            task.cancel()


def a_record(address: str) -> LocationRecord:
    return LocationRecord(kind="worker", id="w", epoch=1, host="h", grpc_address=address)


def told(lines: list[EventDict]) -> list[EventDict]:
    return [line for line in lines if line["event"] == "worker suspect"]


@pytest.mark.parametrize(("secret", "detail"), [("another secret of a mesh", "UNAUTHENTICATED"), ("", "UNAVAILABLE")])
async def test_a_worker_that_never_answers_is_told(secret: str, detail: str) -> None:
    server = MeshServer("127.0.0.1:0", secret=MeshSecret(secret)) if secret else None
    if server is not None:
        server.add(worker_pb2_grpc.add_WorkerServicer_to_server, worker_pb2_grpc.WorkerServicer(), "kvmesh.v1.Worker")
    address = await server.start() if server is not None else UNREACHABLE
    with watching(a_record(address)) as lines:
        await eventually(lambda: told(lines))
        assert [(line["worker_id"], line["detail"]) for line in told(lines)] == [("w", detail)]
    if server is not None:
        await server.stop(0)


async def test_another_worker_at_the_address_is_told() -> None:
    client = connect_redis("redis://127.0.0.1:1/0")
    stranger = FakeWorker(client, SECRET, "stranger")
    await stranger.start()
    with watching(a_record(stranger.address)) as lines:
        await eventually(lambda: told(lines))
        assert told(lines)[0]["detail"] == "stranger at the address of w"
    await stranger.stop(withdraw=False)
    await client.aclose()
