"""The server factory over real gRPC: the mesh secret, health, and trace context and request id in a handler."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvmesh.v1 import kvstore_pb2, kvstore_pb2_grpc
from opentelemetry import trace

from services.common.rpc import MeshServer, call_metadata, open_channel
from services.common.security import MeshSecret

SECRET = MeshSecret("a secret of sixteen")
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


class Stats(kvstore_pb2_grpc.KvStoreServicer):
    """Answers with what the call's context says."""

    async def Stats(  # type: ignore[override]
        self, request: kvstore_pb2.StatsRequest, context: grpc.aio.ServicerContext
    ) -> kvstore_pb2.StatsResponse:
        trace_id = trace.get_current_span().get_span_context().trace_id
        request_id = structlog.contextvars.get_contextvars().get("request_id", "")
        return kvstore_pb2.StatsResponse(kvstore_id=f"{trace_id:032x}/{request_id}")


async def started(listen: str = "127.0.0.1:0") -> MeshServer:
    server = MeshServer(listen, secret=SECRET)
    server.add(kvstore_pb2_grpc.add_KvStoreServicer_to_server, Stats(), "kvmesh.v1.KvStore")
    await server.start()
    return server


async def test_secret_trace_and_request_id() -> None:
    server = await started()
    async with open_channel(server.address) as channel:
        stub = kvstore_pb2_grpc.KvStoreStub(channel)
        metadata = (
            *call_metadata(SECRET, request_id="r1"),
            ("traceparent", f"00-{TRACE_ID}-b7ad6b7169203331-01"),
        )
        answer = await stub.Stats(kvstore_pb2.StatsRequest(), metadata=metadata, timeout=30)
        assert answer.kvstore_id == f"{TRACE_ID}/r1"
        for wrong in ((), call_metadata(MeshSecret("another secret, long"))):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stub.Stats(kvstore_pb2.StatsRequest(), metadata=wrong, timeout=30)
            assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED
    await server.stop(0)


async def test_health_is_open_and_follows_readiness() -> None:
    server = await started()
    async with open_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for ready, status in ((False, "NOT_SERVING"), (True, "SERVING")):
            await server.set_ready(ready)
            answer = await stub.Check(health_pb2.HealthCheckRequest(service="kvmesh.v1.KvStore"), timeout=30)
            assert health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status) == status
    await server.stop(0)


async def test_only_who_asks_after_a_service_is_told_that_it_ends() -> None:
    server = await started()
    async with open_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        await server.set_ready(True)
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert await server.balancers_told(0)
        await stub.Check(health_pb2.HealthCheckRequest(service="kvmesh.v1.KvStore"), timeout=30)
        await server.set_ready(False)
        assert not await server.balancers_told(0)
        for _ in range(2):
            await stub.Check(health_pb2.HealthCheckRequest(service="kvmesh.v1.KvStore"), timeout=30)
        assert await server.balancers_told(0)
    await server.stop(0)


async def test_taken_port_is_named() -> None:
    server = await started()
    with pytest.raises(RuntimeError, match=server.address):
        await started(server.address)
    await server.stop(0)
