"""A load source behind a gateway: a router that grants everything and a worker that sends tokens as told.

Started by bench.gateway as a process of its own; prints its two addresses and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

from kvmesh.v1 import router_pb2, worker_pb2
from kvmesh.v1.common_pb2 import FINISH_REASON_LENGTH, Usage
from kvmesh.v1.router_pb2 import DescribeResponse, Grant, ModelSnapshot, RouteRequest, RouteResponse, ServedModel
from kvmesh.v1.router_pb2_grpc import RouterServicer, add_RouterServicer_to_server
from kvmesh.v1.worker_pb2 import Admitted, Completed, TokenChunk, WorkerChoiceFinish, WorkerGenerateResponse
from kvmesh.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server

from services.common.rpc import MeshServer
from services.common.security import MeshSecret

SECRET = "a secret for the benchmark only"
_FIRST_TOKEN, _NUM_TOKENS = 300, 20_000
_OUTBOX = 4096


class PacedWorker(WorkerServicer):
    """Sends the tokens of each attempt one by one, `step_s` apart."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    async def Serve(
        self, requests: AsyncIterator[worker_pb2.ServeRequest], context: Any
    ) -> AsyncIterator[worker_pb2.ServeBatch]:
        """What all attempts say, as it comes."""
        outbox: asyncio.Queue[worker_pb2.AttemptEvents] = asyncio.Queue(_OUTBOX)
        reading = asyncio.create_task(self._read(requests, outbox))
        try:
            while True:
                parts = [await outbox.get()]
                while not outbox.empty():
                    parts.append(outbox.get_nowait())
                yield worker_pb2.ServeBatch(attempts=parts)
        finally:
            reading.cancel()

    async def _read(
        self, requests: AsyncIterator[worker_pb2.ServeRequest], outbox: asyncio.Queue[worker_pb2.AttemptEvents]
    ) -> None:
        running: dict[int, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            async for message in requests:
                if message.HasField("start"):
                    running[message.start.key] = group.create_task(self._attempt(message.start, outbox))
                elif message.cancel in running:
                    running.pop(message.cancel).cancel()

    async def _attempt(self, start: worker_pb2.StartAttempt, outbox: asyncio.Queue[worker_pb2.AttemptEvents]) -> None:
        async for message in self.Generate(start.request, None):
            await outbox.put(worker_pb2.AttemptEvents(key=start.key, events=[message]))
        await outbox.put(worker_pb2.AttemptEvents(key=start.key, end=worker_pb2.AttemptEnd()))

    async def Generate(
        self, request: worker_pb2.WorkerGenerateRequest, context: Any
    ) -> AsyncIterator[WorkerGenerateResponse]:
        """Tokens up to the request's limit."""
        yield WorkerGenerateResponse(admitted=Admitted(worker_id="load"))
        for i in range(request.max_tokens):
            token = _FIRST_TOKEN + (i * 7919) % _NUM_TOKENS
            yield WorkerGenerateResponse(tokens=TokenChunk(choice=0, token_ids=[token]))
            if self._step_s:
                await asyncio.sleep(self._step_s)
        yield WorkerGenerateResponse(finish=WorkerChoiceFinish(choice=0, reason=FINISH_REASON_LENGTH))
        yield WorkerGenerateResponse(completed=Completed(usage=Usage(output_tokens=request.max_tokens)))

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.WorkerReport]:
        """One report."""
        yield worker_pb2.WorkerReport()

    async def Drain(self, request: Any, context: Any) -> worker_pb2.DrainResponse:
        """Nothing to drain."""
        return worker_pb2.DrainResponse()


class GrantingRouter(RouterServicer):
    """Grants every ask to one worker."""

    def __init__(self, worker_address: str) -> None:
        self._worker_address = worker_address

    async def Route(self, requests: AsyncIterator[RouteRequest], context: Any) -> AsyncIterator[RouteResponse]:
        """A grant for each ask."""
        async for message in requests:
            if message.HasField("ask"):
                ask = message.ask
                grant = Grant(request_id=ask.request_id, attempt=ask.attempt, worker_address=self._worker_address)
                yield RouteResponse(grant=grant)

    async def WatchModels(self, request: Any, context: Any) -> AsyncIterator[ModelSnapshot]:
        """The default model, every 5 s."""
        model = ServedModel(
            name="smollm2-135m", digest=b"d" * 16, context_length=8192, kv_dtype="bfloat16", block_tokens=16,
            layout_version=1, ready_replicas=1, vocab_size=49152,
        )  # fmt: skip
        while True:
            yield ModelSnapshot(models=[model])
            await asyncio.sleep(5.0)

    async def Describe(self, request: Any, context: Any) -> DescribeResponse:
        """Nothing to tell."""
        return DescribeResponse()


async def serve(step_s: float) -> None:
    """Serve until standard input ends."""
    secret = MeshSecret(SECRET)
    worker, router = MeshServer("127.0.0.1:0", secret=secret), MeshServer("127.0.0.1:0", secret=secret)
    name = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
    worker.add(add_WorkerServicer_to_server, PacedWorker(step_s), name)
    worker_address = await worker.start()
    name = router_pb2.DESCRIPTOR.services_by_name["Router"].full_name
    router.add(add_RouterServicer_to_server, GrantingRouter(worker_address), name)
    router_address = await router.start()
    print(router_address, worker_address, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await router.stop(0)
    await worker.stop(0)


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1])))
