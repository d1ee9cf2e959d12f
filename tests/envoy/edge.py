"""A real Envoy in front of a real gRPC server that does what each request's body asks of it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.api.httpbody_pb2 import HttpBody
from google.protobuf.empty_pb2 import Empty
from kvmesh.v1 import inference_pb2, inference_pb2_grpc, openai_pb2, openai_pb2_grpc, router_pb2, router_pb2_grpc

from deploy.envoy.bootstrap import bootstrap_json
from deploy.envoy.settings import Address, EnvoySettings
from services.cli.binaries import envoy_binary
from services.common.rpc import ELSEWHERE_METADATA, MeshServer
from tests.envoy.http_client import request
from tests.support.processes import free_port

Context = grpc.aio.ServicerContext[Any, Any]
STATUSES = {code.name: code for code in grpc.StatusCode}


@dataclass
class OpenAIServer(openai_pb2_grpc.OpenAIServicer):
    """Bodies are JSON scripts: {"events": N, "gap_s": S}, {"fail": STATUS, "begun": true, ...}, {"echo": true}."""

    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    draining: bool = False
    calls: int = 0
    bodies: list[bytes] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    release: asyncio.Event = field(default_factory=asyncio.Event)

    async def ChatCompletions(self, request: HttpBody, context: Context) -> AsyncIterator[HttpBody]:
        self.calls += 1
        if self.draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "draining", ((ELSEWHERE_METADATA, "1"),))
        self.metadata.append({key: str(value) for key, value in context.invocation_metadata() or ()})
        try:
            script = json.loads(request.data)
        except ValueError:
            self.bodies.append(request.data)
            await self._fail({"fail": "INVALID_ARGUMENT", "error": {"message": "not JSON"}}, context)
            return
        if script.get("begun"):
            await context.send_initial_metadata((("x-kvmesh-worker", "worker-0"),))
        if "fail" in script:
            await self._fail(script, context)
        await context.send_initial_metadata((("x-kvmesh-worker", "worker-0"),))
        try:
            for number in range(script.get("events", 0)):
                yield HttpBody(content_type="text/event-stream", data=f"data: {number}\n\n".encode())
                await asyncio.sleep(script.get("gap_s", 0))
            if script.get("hold"):
                await self.release.wait()
            if "size" in script or not script.get("events"):
                yield HttpBody(content_type="application/json", data=b'{"length":%d}' % len(request.data))
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def _fail(self, script: dict[str, Any], context: Context) -> None:
        trailing = [("retry-after", script["retry_after"])] if "retry_after" in script else []
        if "error" in script:
            error = {"message": "", "type": "t", "param": None, "code": None, **script["error"]}
            trailing.append(("x-openai-error", json.dumps({"error": error})))
        await context.abort(STATUSES[script["fail"]], "one line", tuple(trailing))

    async def ListModels(self, request: Empty, context: Context) -> HttpBody:
        return HttpBody(content_type="application/json", data=b'{"object":"list"}')

    async def GetModel(self, request: openai_pb2.GetModelRequest, context: Context) -> HttpBody:
        if request.id == "missing":
            await self._fail({"fail": "NOT_FOUND", "error": {"message": "no", "code": "model_not_found"}}, context)
        return HttpBody(content_type="application/json", data=json.dumps({"id": request.id}).encode())

    async def Healthz(self, request: Empty, context: Context) -> HttpBody:
        return HttpBody(content_type="application/json", data=b'{"status":"ok"}')


class InferenceServer(inference_pb2_grpc.InferenceServicer):
    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        if request.model == "missing":
            error = json.dumps({"error": {"message": "no", "type": "t", "param": None, "code": None}})
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such model", (("x-openai-error", error),))
        for token in range(3):
            delta = inference_pb2.GenerateDelta(token_ids=[token], text=str(context.time_remaining() is not None))
            yield inference_pb2.GenerateResponse(delta=delta)


@dataclass
class Gateway:
    """One upstream."""

    openai: OpenAIServer
    server: MeshServer
    address: str


@asynccontextmanager
async def serving_gateway(listen: str = "127.0.0.1:0") -> AsyncIterator[Gateway]:
    """A ready gateway with both public services, and an in-mesh one that must not be reachable from outside."""
    server, openai = MeshServer(listen, secret=None), OpenAIServer()
    openai_name = openai_pb2.DESCRIPTOR.services_by_name["OpenAI"].full_name
    inference_name = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
    server.add(openai_pb2_grpc.add_OpenAIServicer_to_server, openai, openai_name)
    server.add(inference_pb2_grpc.add_InferenceServicer_to_server, InferenceServer(), inference_name)
    router_name = router_pb2.DESCRIPTOR.services_by_name["Router"].full_name
    server.add(router_pb2_grpc.add_RouterServicer_to_server, router_pb2_grpc.RouterServicer(), router_name)
    address = await server.start()
    await server.set_ready(True)
    try:
        yield Gateway(openai, server, address)
    finally:
        await server.stop(0)


@dataclass
class Edge:
    """A running Envoy."""

    port: int
    admin_port: int
    log: Path

    async def stat(self, name: str) -> int:
        """One counter or gauge of Envoy."""
        async with request(self.admin_port, "GET", f"/stats?filter=^{name}$") as response:
            return int((await response.body()).split(b": ")[1])


@asynccontextmanager
async def running_envoy(folder: Path, *gateways: str, **options: Any) -> AsyncIterator[Edge]:
    """Envoy in front of `gateways`, healthy ones known."""
    port, admin = free_port(), free_port()
    settings = EnvoySettings(
        listen=Address("127.0.0.1", port),
        admin=Address("127.0.0.1", admin),
        gateways=tuple(Address.parse(one) for one in gateways),
        **options,
    )
    config, log = folder / "envoy.json", folder / "envoy.log"
    config.write_text(bootstrap_json(settings))
    arguments = [str(envoy_binary()), "-c", str(config), "--concurrency", "1", "--disable-hot-restart"]
    with log.open("w") as output:
        process = subprocess.Popen([*arguments, "-l", "warn"], stdout=output, stderr=output, env=dict(os.environ))
    edge = Edge(port, admin, log)
    try:
        await _wait_healthy(edge, len(gateways))
        yield edge
    finally:
        process.terminate()
        process.wait(30)


async def _wait_healthy(edge: Edge, hosts: int) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                if await edge.stat("cluster.gateways.membership_healthy") == hosts:
                    return
            except (OSError, IndexError):
                pass
            await asyncio.sleep(0.02)
