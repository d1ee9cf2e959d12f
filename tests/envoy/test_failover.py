"""Gateways that die, drain or are not there at all."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from kvmesh.v1 import inference_pb2, inference_pb2_grpc

from tests.envoy.edge import running_envoy, serving_gateway
from tests.envoy.http_client import request
from tests.support.processes import free_port

MODELS = "/v1/models"


async def test_no_gateway_is_503_with_retry_after(tmp_path: Path) -> None:
    async with serving_gateway() as gateway, running_envoy(tmp_path, gateway.address) as edge:
        await gateway.server.stop(0)
        for _ in range(3):
            async with request(edge.port, "GET", MODELS) as response:
                assert response.status == 503
                assert response.headers["retry-after"] == "1"
                assert (await response.error())["type"] == "overloaded_error"
        async with grpc.aio.insecure_channel(f"127.0.0.1:{edge.port}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Tokenize(inference_pb2.TokenizeRequest(), timeout=30)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            assert "{" not in (caught.value.details() or "")


async def test_no_request_fails_when_one_of_two_gateways_dies(tmp_path: Path) -> None:
    async with serving_gateway() as stays, serving_gateway() as dies:
        async with running_envoy(tmp_path, stays.address, dies.address) as edge:
            await dies.server.stop(0)
            for _ in range(40):
                async with request(edge.port, "GET", MODELS) as response:
                    assert response.status == 200
            async with asyncio.timeout(60):
                while await edge.stat("cluster.gateways.membership_healthy") != 1:
                    await asyncio.sleep(0.05)


async def test_a_gateway_that_drains_gets_no_new_work(tmp_path: Path) -> None:
    async with serving_gateway() as stays, serving_gateway() as drains:
        async with running_envoy(tmp_path, stays.address, drains.address) as edge:
            await drains.server.set_ready(False)
            async with asyncio.timeout(60):
                while await edge.stat("cluster.gateways.membership_healthy") != 1:
                    await asyncio.sleep(0.05)
            for _ in range(10):
                async with request(edge.port, "POST", "/v1/chat/completions", b"{}") as response:
                    assert response.status == 200
            assert (stays.openai.calls, drains.openai.calls) == (10, 0)


async def test_who_leaves_after_its_balancers_have_heard_is_missed_by_nobody(tmp_path: Path) -> None:
    async with serving_gateway() as stays, serving_gateway() as leaves:
        async with running_envoy(tmp_path, stays.address, leaves.address) as edge:
            assert not await leaves.server.balancers_told(0), "Envoy asks, and has heard that it serves"
            leaves.openai.draining = True
            await leaves.server.set_ready(False)
            assert await leaves.server.balancers_told(20)
            assert await edge.stat("cluster.gateways.membership_healthy") <= 1
            await leaves.server.stop(0)
            for _ in range(20):
                async with request(edge.port, "POST", "/v1/chat/completions", b"{}") as response:
                    assert response.status == 200
            assert (stays.openai.calls, leaves.openai.calls) == (20, 0)


async def test_what_a_draining_gateway_refuses_goes_to_another(tmp_path: Path) -> None:
    """Between the moment that it drains and the health check that tells Envoy."""
    async with serving_gateway() as stays, serving_gateway() as drains:
        async with running_envoy(tmp_path, stays.address, drains.address) as edge:
            drains.openai.draining = True
            for _ in range(20):
                async with request(edge.port, "POST", "/v1/chat/completions", b"{}") as response:
                    assert response.status == 200
            assert drains.openai.calls > 0


async def test_a_gateway_that_comes_back_is_used_again(tmp_path: Path) -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with serving_gateway(listen) as first, running_envoy(tmp_path, first.address) as edge:
        await first.server.stop(0)
        async with request(edge.port, "GET", MODELS) as response:
            assert response.status == 503
        async with serving_gateway(listen), asyncio.timeout(60):
            while True:
                async with request(edge.port, "GET", MODELS) as response:
                    if response.status == 200:
                        return
                await asyncio.sleep(0.05)
