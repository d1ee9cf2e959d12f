"""A sealed artifact from other workers' caches into this one: each chunk verified, another peer where one fails.

What has come stays: the next peer goes on where the last one ended. A peer that is silent for CHUNK_DEADLINE_S, or
sends a chunk that is not what the manifest says, is not asked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import grpc
import grpc.aio
import structlog
from kvmesh.v1 import artifacts_pb2, artifacts_pb2_grpc

from services.common.artifacts.cache import EntryInfo, Lease, ModelCache
from services.common.artifacts.chunk_reader import CHUNK_BYTES, Progress, chunk_digest, num_chunks
from services.common.artifacts.errors import CopyFailed
from services.common.artifacts.manifest import FileEntry, Manifest
from services.common.artifacts.staging import Staging
from services.common.rpc import call_metadata, open_channel
from services.common.security import MeshSecret
from services.worker.artifacts.threads import owned

CHUNK_DEADLINE_S = 10.0
# The call's own deadline, which also frees the holder's place when the receiver hangs.
_LEAST_BYTES_PER_S = 4 * 2**20
_log = structlog.get_logger()


class PeerCopy:
    """One copy under way."""

    def __init__(self, cache: ModelCache, manifest: Manifest, secret: MeshSecret, progress: Progress) -> None:
        self._cache = cache
        self._manifest = manifest
        self._secret = secret
        self._progress = progress
        self._missing = dict.fromkeys(sorted(manifest.files), 0)

    async def run(self, peers: Sequence[str], info: EntryInfo) -> Lease:
        """Copy from the first peer that has it, then from the next. Raises CopyFailed or CacheFull."""
        sizes = {name: entry.size for name, entry in self._manifest.files.items()}
        staging = await asyncio.to_thread(self._cache.begin, sizes.values())
        try:
            for name, size in sizes.items():
                await asyncio.to_thread(staging.create, name, size)
            for peer in peers:
                if await self._from_peer(staging, peer):
                    return await owned(lambda: self._cache.commit(staging, self._manifest, info))
            raise CopyFailed(f"{info.name}: none of {len(peers)} workers could give all of it")
        finally:
            await asyncio.shield(asyncio.to_thread(self._cache.discard, staging))

    async def _from_peer(self, staging: Staging, peer: str) -> bool:
        """Everything that is still missing; False when the peer failed."""
        try:
            async with open_channel(peer) as channel:
                for name in list(self._missing):
                    await self._file(artifacts_pb2_grpc.ArtifactsStub(channel), staging, name)
        except (grpc.aio.AioRpcError, TimeoutError, CopyFailed) as error:
            reason = error.code().name if isinstance(error, grpc.aio.AioRpcError) else str(error) or "silent"
            _log.warning("a worker could not give a model", peer=peer, reason=reason)
            return False
        return True

    async def _file(self, stub: artifacts_pb2_grpc.ArtifactsAsyncStub, staging: Staging, name: str) -> None:
        entry = self._manifest.files[name]
        asked = artifacts_pb2.FetchRequest(digest=self._manifest.digest, file=name, first_chunk=self._missing[name])
        timeout_s = CHUNK_DEADLINE_S + entry.size / _LEAST_BYTES_PER_S
        async with aclosing(_received(stub, asked, self._secret, timeout_s)) as chunks:
            async for chunk in chunks:
                await asyncio.to_thread(_keep, staging, name, entry, self._missing[name], chunk)
                self._missing[name] += 1
                self._progress(len(chunk.data))
        if self._missing[name] < num_chunks(entry.size):
            raise CopyFailed(f"{name}: ended after {self._missing[name]} chunks")
        del self._missing[name]


def _keep(
    staging: Staging, name: str, entry: FileEntry, expected_chunk: int, chunk: artifacts_pb2.ArtifactChunk
) -> None:
    """Write the next chunk, in a thread. Raises CopyFailed unless it is that, and the right one."""
    if chunk.chunk != expected_chunk or expected_chunk >= num_chunks(entry.size):
        raise CopyFailed(f"{name}: chunk {chunk.chunk} came for {expected_chunk}")
    if chunk_digest([memoryview(chunk.data)]) != entry.expected[chunk.chunk]:
        raise CopyFailed(f"{name}: chunk {chunk.chunk} differs from the manifest")
    staging.write(name, chunk.chunk * CHUNK_BYTES, [memoryview(chunk.data)])


async def _received(
    stub: artifacts_pb2_grpc.ArtifactsAsyncStub,
    request: artifacts_pb2.FetchRequest,
    secret: MeshSecret,
    timeout_s: float,
) -> AsyncGenerator[artifacts_pb2.ArtifactChunk, None]:
    """Chunks until the stream ends. Raises AioRpcError, or TimeoutError when it is silent."""
    call = stub.Fetch(request, metadata=call_metadata(secret), timeout=timeout_s)
    try:
        while True:
            async with asyncio.timeout(CHUNK_DEADLINE_S):
                chunk = await call.read()
            if not isinstance(chunk, artifacts_pb2.ArtifactChunk):
                return
            yield chunk
    finally:
        call.cancel()
