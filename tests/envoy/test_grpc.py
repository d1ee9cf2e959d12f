"""Native gRPC on the same port, and what must not be reachable there."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc
from kvmesh.v1 import inference_pb2, inference_pb2_grpc, router_pb2, router_pb2_grpc

from tests.envoy.edge import Edge


@pytest.fixture
async def channel(edge: Edge) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{edge.port}") as opened:
        yield opened


async def test_generate_streams_and_the_deadline_travels(channel: grpc.aio.Channel) -> None:
    stub = inference_pb2_grpc.InferenceStub(channel)
    deltas = [one.delta async for one in stub.Generate(inference_pb2.GenerateRequest(model="m"), timeout=30)]
    assert [list(delta.token_ids) for delta in deltas] == [[0], [1], [2]]
    assert {delta.text for delta in deltas} == {"True"}


async def test_metadata_that_grpc_cannot_parse_harms_nobody_else(channel: grpc.aio.Channel) -> None:
    stub = inference_pb2_grpc.InferenceStub(channel)
    wanted = inference_pb2.GenerateRequest(model="m")
    for metadata in ((("grpc-previous-rpc-attempts", "x"),), (("grpc-retry-pushback-ms", "x"),), (("any-bin", b"\0"),)):
        for _ in range(2):
            assert len([one async for one in stub.Generate(wanted, timeout=30, metadata=metadata)]) == 3


async def test_a_compressed_request_passes(channel: grpc.aio.Channel) -> None:
    call = inference_pb2_grpc.InferenceStub(channel).Generate(
        inference_pb2.GenerateRequest(model="m" * 1000), timeout=30, compression=grpc.Compression.Gzip
    )
    assert len([one async for one in call]) == 3


async def test_a_status_stays_a_status(channel: grpc.aio.Channel) -> None:
    call = inference_pb2_grpc.InferenceStub(channel).Generate(
        inference_pb2.GenerateRequest(model="missing"), timeout=30
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.NOT_FOUND, "no such model")
    assert "x-openai-error" in dict(caught.value.trailing_metadata() or ())


async def test_health_is_public(channel: grpc.aio.Channel) -> None:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_in_mesh_services_are_not(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router_pb2_grpc.RouterStub(channel).Describe(router_pb2.DescribeRequest(), timeout=30)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert "{" not in (caught.value.details() or "")


async def test_nor_is_reflection(channel: grpc.aio.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    # Nothing is sent: a message that meets an ended call would hide the status.
    assert await stub.ServerReflectionInfo(timeout=30).code() == grpc.StatusCode.UNIMPLEMENTED
