"""Artifacts of the local cache for other workers: chunk by chunk, only a few at a time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import grpc
import grpc.aio
from kvmesh.v1 import artifacts_pb2, artifacts_pb2_grpc
from opentelemetry import metrics

from services.common.artifacts.cache import Lease, ModelCache
from services.common.artifacts.chunk_reader import CHUNK_BYTES, num_chunks
from services.common.artifacts.errors import ArtifactError
from services.common.artifacts.manifest import Manifest, artifact_root, read_manifest

_meter = metrics.get_meter("kvmesh.worker")
_served = _meter.create_counter("kvmesh_model_served_bytes", description="Bytes of models sent to other workers.")
_refused = _meter.create_counter("kvmesh_model_served_refusals", description="Fetches refused, by reason.")
_Context = grpc.aio.ServicerContext[artifacts_pb2.FetchRequest, artifacts_pb2.ArtifactChunk]


class ArtifactService(artifacts_pb2_grpc.ArtifactsServicer):
    """Fetch. cache None: there is nothing to serve."""

    def __init__(self, cache: ModelCache | None, *, max_serves: int) -> None:
        """max_serves: fetches that run at once; beyond them others are told to ask elsewhere."""
        self._cache = cache
        self._max_serves = max_serves
        self._serving = 0

    async def Fetch(
        self, request: artifacts_pb2.FetchRequest, context: _Context
    ) -> AsyncIterator[artifacts_pb2.ArtifactChunk]:
        """See the protocol."""
        if context.time_remaining() is None:
            # A receiver that hangs would keep its place for ever.
            _refused.add(1, {"reason": "no deadline"})
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a fetch needs a deadline")
        if self._serving >= self._max_serves:
            _refused.add(1, {"reason": "busy"})
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "this worker serves as many copies as it may")
        self._serving += 1
        try:
            found = await asyncio.to_thread(self._find, request.digest)
            if found is None or request.file not in found[1].files:
                _refused.add(1, {"reason": "unknown"})
                await context.abort(grpc.StatusCode.NOT_FOUND, "no such artifact or file")
                return
            lease, manifest = found
            try:
                async for chunk in _chunks(lease, manifest, request):
                    _served.add(len(chunk.data))
                    yield chunk
            except OSError as error:
                _refused.add(1, {"reason": "unreadable"})
                await context.abort(grpc.StatusCode.DATA_LOSS, f"{request.file[:80]}: {error.strerror}")
            finally:
                lease.close()
        finally:
            self._serving -= 1

    def _find(self, digest: str) -> tuple[Lease, Manifest] | None:
        """A lease, so that it is not evicted while it is sent; None when it is not here."""
        if self._cache is None or not digest.isalnum():
            return None
        try:
            lease = self._cache.lease(digest)
        except OSError:
            return None
        if lease is None:
            return None
        try:
            manifest = read_manifest(lease.path)
        except ArtifactError:
            manifest = None
        if manifest is None:
            lease.close()
            return None
        return lease, manifest


async def _chunks(
    lease: Lease, manifest: Manifest, request: artifacts_pb2.FetchRequest
) -> AsyncIterator[artifacts_pb2.ArtifactChunk]:
    size = manifest.files[request.file].size
    descriptor = await asyncio.to_thread(os.open, artifact_root(lease.path) / request.file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for index in range(request.first_chunk, num_chunks(size)):
            data = await asyncio.to_thread(os.pread, descriptor, CHUNK_BYTES, index * CHUNK_BYTES)
            yield artifacts_pb2.ArtifactChunk(chunk=index, data=data)
    finally:
        os.close(descriptor)
