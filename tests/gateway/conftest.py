"""A running gateway between scripted routers and workers, shared by the tests of one module."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from google.api.httpbody_pb2 import HttpBody
from kvmesh.v1.inference_pb2_grpc import InferenceStub
from kvmesh.v1.openai_pb2_grpc import OpenAIStub

from services.common.models import resolve_model
from services.common.rpc import open_channel
from services.gateway.config import GatewaySettings
from services.gateway.server import GatewayServer
from services.gateway.text.text_model import TextModel, load_text_model
from tests.gateway.fakes import SECRET, FakeRouter, FakeWorker, Script
from tests.support.waiting import eventually

ANSWER = "The capital of France is Paris. 🎉 naïve"


@pytest.fixture(scope="session")
def text_model() -> TextModel:
    """The default model's text side."""
    return load_text_model(resolve_model("smollm2-135m"))


@dataclass
class Mesh:
    """Everything of a test: the gateway, its peers, and stubs of both public services."""

    gateway: GatewayServer
    router: FakeRouter
    workers: list[FakeWorker]
    openai: OpenAIStub
    native: InferenceStub
    text: TextModel
    channel: grpc.aio.Channel
    plan: list[Script]  # one for each request in turn, the last again and again

    def say(self, text: str, **changes: Any) -> None:
        """Have workers answer with `text`."""
        self.plan[:] = [Script(self.text.encode_text(text), **changes)]

    def reset(self) -> None:
        """Back to the default script and empty records."""
        self.say(ANSWER)
        self.router.refusal, self.router.mute = None, False
        self.router.asks.clear()
        self.router.dones.clear()
        for worker in self.workers:
            worker.requests.clear()
            worker.metadata.clear()

    async def post(self, path: str, body: Any, **options: Any) -> bytes:
        """All data of an OpenAI call. body: an object or raw bytes."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        call = getattr(self.openai, path)(HttpBody(content_type="application/json", data=raw), **options)
        try:
            return b"".join([message.data async for message in call])
        finally:
            # A task that is cancelled before its first read leaves the call to the garbage collector.
            call.cancel()

    async def chat(self, text: str = "hi", **fields: Any) -> dict[str, Any]:
        """An unstreamed chat completion."""
        body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": text}], **fields}
        value: dict[str, Any] = json.loads(await self.post("ChatCompletions", body))
        return value

    async def complete(self, prompt: Any = "hi", **fields: Any) -> dict[str, Any]:
        """An unstreamed completion."""
        body = {"model": "smollm2-135m", "prompt": prompt, **fields}
        value: dict[str, Any] = json.loads(await self.post("Completions", body))
        return value

    async def error(
        self, path: str, body: Any, **options: Any
    ) -> tuple[grpc.StatusCode, dict[str, Any], dict[str, str]]:
        """Status, OpenAI error and trailing metadata of a call that must fail."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.post(path, body, **options)
        trailing = {key: str(value) for key, value in caught.value.trailing_metadata()}
        return caught.value.code(), json.loads(trailing["x-openai-error"])["error"], trailing

    def assert_idle(self) -> None:
        """Every per-request map of the gateway is empty."""
        core = self.gateway.core
        assert core.admission.total == 0
        assert core.admission.statistics() == {}
        assert core.inflight_ids == set()
        assert self.gateway.router.num_pending == 0
        assert self.gateway.channels.users() == 0
        assert len(self.gateway.pulse) == 0
        assert core.placement.line.num_waiting == 0
        assert core.placement.line.num_asking == 0
        assert self.gateway.quotas.num_open == 0
        assert self.gateway.keyed.num_open == 0

    async def wait_idle(self) -> None:
        """Wait until nothing runs anywhere."""
        await eventually(lambda: not any(w.running for w in self.workers) and not self.gateway.core.admission.total)
        self.assert_idle()


@asynccontextmanager
async def running_mesh(text: TextModel, *, workers: int = 1, **settings: Any) -> AsyncIterator[Mesh]:
    """A mesh of one scripted router, scripted workers and a gateway."""
    async with AsyncExitStack() as stack:
        plan = [Script(text.encode_text(ANSWER))]
        router = FakeRouter()
        fakes = [FakeWorker(f"w{i}", lambda _: plan.pop(0) if len(plan) > 1 else plan[0]) for i in range(workers)]
        for worker in fakes:
            router.workers[worker.worker_id] = await worker.start()
            stack.push_async_callback(worker.server.stop, 0)
        address = await router.start()
        stack.push_async_callback(router.server.stop, 0)
        options = {"routers": (address,), "text_processes": 1, "models": ("smollm2-135m",), **settings}
        gateway = await stack.enter_async_context(GatewayServer(GatewaySettings(**options), SECRET).running())
        channel = open_channel(gateway.address)
        stack.push_async_callback(channel.close, None)
        mesh = Mesh(gateway, router, fakes, OpenAIStub(channel), InferenceStub(channel), text, channel, plan)
        await eventually(lambda: gateway.core.catalog.is_ready)
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_mesh(text_model: TextModel) -> AsyncIterator[Mesh]:
    """One mesh with two workers for a module."""
    async with running_mesh(text_model, workers=2) as mesh:
        yield mesh


@pytest_asyncio.fixture(loop_scope="module")
async def mesh(shared_mesh: Mesh) -> AsyncIterator[Mesh]:
    """The module's mesh, reset before and idle after each test."""
    shared_mesh.reset()
    yield shared_mesh
    await shared_mesh.wait_idle()
