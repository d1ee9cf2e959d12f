"""A Worker server over real gRPC whose reports a test writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from kvmesh.v1 import worker_pb2, worker_pb2_grpc

from services.common.announcer import Announcer
from services.common.redis_client import RedisClient
from services.common.registry import LocationRecord, Registrar, new_epoch
from services.common.rpc import MeshServer
from services.common.security import MeshSecret

DIGEST = b"d" * 16


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """Registered, announced and watched like a real one; it runs nothing."""

    def __init__(self, client: RedisClient, secret: MeshSecret, name: str) -> None:
        self.name = name
        self.epoch = new_epoch()
        self.load = worker_pb2.WorkerLoad(ready=True, free_blocks=10_000)
        self.silent = False
        self._admitted: list[str] = []
        self._client = client
        self._secret = secret
        self._tasks: list[asyncio.Task[None]] = []
        self.announcer = Announcer(client, kind="worker", location_id=name, epoch=self.epoch)

    async def start(self) -> None:
        self._server = MeshServer("127.0.0.1:0", secret=self._secret)
        self._server.add(worker_pb2_grpc.add_WorkerServicer_to_server, self, "kvmesh.v1.Worker")
        self.address = await self._server.start()
        record = LocationRecord(
            kind="worker",
            id=self.name,
            epoch=self.epoch,
            host="h",
            grpc_address=self.address,
            pull_address=f"{self.name}:9",
            model="m",
            started_s=1_700_000_000,
        )
        self._registrar = Registrar(self._client, record)
        self._tasks = [asyncio.create_task(part.run()) for part in (self._registrar, self.announcer)]

    async def stop(self, *, withdraw: bool = True) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if withdraw:
            await self._registrar.close()
            await self.announcer.close()
        await self._server.stop(0)

    def admit(self, attempt: str) -> None:
        self._admitted.append(attempt)

    async def Watch(
        self, request: worker_pb2.WatchRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.WorkerReport]:
        yield worker_pb2.WorkerReport(identity=self._identity())
        told = 0
        while True:
            if not self.silent:
                load = worker_pb2.WorkerLoad()
                load.CopyFrom(self.load)
                load.admitted.extend(self._admitted[told:])
                told = len(self._admitted)
                yield worker_pb2.WorkerReport(load=load)
            await asyncio.sleep(0.05)

    def _identity(self) -> worker_pb2.WorkerIdentity:
        return worker_pb2.WorkerIdentity(
            worker_id=self.name,
            epoch=self.epoch,
            model="m",
            model_digest=DIGEST,
            context_length=8192,
            dtype="bfloat16",
            kv_dtype="bfloat16",
            weight_format="gguf:Q4_1",
            block_tokens=16,
            layout_version=1,
            vocab_size=100,
            tokenizer_digest=b"t" * 16,
            total_blocks=10_000,
            block_bytes=400_000,
            prefill_tokens_per_s=2000,
            decode_step_s=0.02,
            step_token_budget=256,
            max_running_requests=16,
        )
