"""The same requests straight to one worker over gRPC: what gateway and Envoy add is the difference."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kvmesh.v1 import common_pb2, worker_pb2, worker_pb2_grpc

from bench.load import Timing
from services.common.blocks import BlockId, block_root, cache_namespace, chain_block_ids, join_ids, owner_digest
from services.common.rpc import call_metadata, open_channel
from services.common.security import MeshSecret

_TENANT = "bench"
_IDENTITY_TIMEOUT_S = 5.0


class DirectLoad:
    """Requests to one worker. Block ids are computed before the clock starts, as the gateway's work."""

    def __init__(
        self, stub: worker_pb2_grpc.WorkerAsyncStub, identity: worker_pb2.WorkerIdentity, secret: MeshSecret
    ) -> None:
        self._stub = stub
        self._identity = identity
        self._secret = secret
        self._root: BlockId = block_root(
            secret.block_key,
            model_digest=identity.model_digest,
            kv_dtype=identity.kv_dtype,
            layout_version=identity.layout_version,
            namespace=cache_namespace(tenant=_TENANT, generation=0),
        )

    async def send(self, prompt: Sequence[int], output_tokens: int) -> Timing:
        """One request; tokens are counted as they come. Raises grpc.aio.AioRpcError."""
        request = self._request(prompt, output_tokens)
        metadata = call_metadata(self._secret, request.request_id)
        first_s = last_s = 0.0
        tokens = cached = 0
        start = time.perf_counter()
        async for response in self._stub.Generate(request, metadata=metadata):
            kind = response.WhichOneof("event")
            if kind == "tokens":
                last_s = time.perf_counter() - start
                first_s = first_s or last_s
                tokens += len(response.tokens.token_ids)
            elif kind == "completed":
                local = response.completed.usage.cached
                cached = local.local + local.peer + local.ram + local.ssd
        if tokens == 0:
            raise RuntimeError("the worker answered STALE: its queue is full")
        return Timing(first_s, last_s, tokens, cached)

    def _request(self, prompt: Sequence[int], output_tokens: int) -> worker_pb2.WorkerGenerateRequest:
        key = self._secret.block_key
        ids = chain_block_ids(key, self._root, prompt, self._identity.block_tokens)
        return worker_pb2.WorkerGenerateRequest(
            request_id=f"bench-{uuid.uuid4().hex}",
            attempt=1,
            model_digest=self._identity.model_digest,
            prompt_token_ids=prompt,
            block_root=self._root,
            prompt_block_ids=join_ids(ids),
            owner_digest=owner_digest(key, tenant=_TENANT),
            sampling=common_pb2.SamplingParams(temperature=0, top_p=1, repetition_penalty=1),
            num_choices=1,
            max_tokens=output_tokens,
            priority=common_pb2.PRIORITY_CLASS_STANDARD,
        )


@asynccontextmanager
async def direct_load(address: str, secret: MeshSecret) -> AsyncIterator[DirectLoad]:
    """A load on the worker at `address`, whose identity is read from its first report."""
    async with open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        async with asyncio.timeout(_IDENTITY_TIMEOUT_S):
            watch = stub.Watch(worker_pb2.WatchRequest(), metadata=call_metadata(secret))
            report = await anext(aiter(watch))
            watch.cancel()
        yield DirectLoad(stub, report.identity, secret)
