"""Where a worker gets a model's files from: the local cache, else a peer's, else the shared storage.

Without a cache directory a model is read where it lies. With one it is copied once for each machine: one process
copies, the others wait for it. A sealed artifact comes from workers that have it while there are any; the shared
storage itself is read by at most `source_readers` workers of the mesh at once, and those that wait look for peers at
every try, so that a fleet fills from its first copies. Nothing that does not match its manifest becomes an entry.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import structlog
from opentelemetry import metrics

from services.common.artifacts.cache import Lease, ModelCache
from services.common.artifacts.errors import ArtifactError, CacheFull, CopyFailed, CopyTimeout, InvalidArtifact
from services.common.artifacts.file_lock import FileLock
from services.common.artifacts.local_copy import copy_from_source, entry_info, source_fingerprint
from services.common.artifacts.manifest import (
    Manifest,
    artifact_files,
    artifact_root,
    file_size,
    read_manifest,
    verify_artifact,
)
from services.common.models import ModelSource
from services.common.security import MeshSecret
from services.worker.artifacts.leases import SharedPlaces, retry_pause_s
from services.worker.artifacts.peer_copy import PeerCopy
from services.worker.artifacts.threads import in_thread, owned

_POLL_S = 0.2
_MAX_PEERS = 4
_log = structlog.get_logger()
_meter = metrics.get_meter("kvmesh.worker")
_copied = _meter.create_counter("kvmesh_model_copied_bytes", description="Bytes of models copied here, by origin.")
_acquired = _meter.create_counter("kvmesh_model_acquired", description="Models made ready to load, by origin.")
_failures = _meter.create_counter("kvmesh_model_copy_failures", description="Copies that broke off, by origin.")
_damaged = _meter.create_counter("kvmesh_model_damaged", description="Cached models that had rotted and were removed.")


@dataclass(frozen=True, slots=True)
class Acquired:
    """A model whose files may be read. lease: of the cache's entry; None where they are read where they lie."""

    source: ModelSource
    lease: Lease | None

    def close(self) -> None:
        """They are needed no longer. Idempotent."""
        if self.lease is not None:
            self.lease.close()


class ModelStore:
    """One worker's way to its models."""

    def __init__(
        self,
        cache: ModelCache | None,
        places: SharedPlaces,
        secret: MeshSecret,
        *,
        source_readers: int,
        copy_timeout_s: float,
    ) -> None:
        self.cache = cache
        self._places = places
        self._secret = secret
        self._source_readers = source_readers
        self._copy_timeout_s = copy_timeout_s

    async def acquire(self, source: ModelSource, told: Callable[[int, int], None]) -> Acquired:
        """Have the files here. told(bytes so far, all bytes): how far a copy is, from any thread.

        Raises ArtifactError with one line. Cancelling stops a copy and leaves nothing of it.
        """
        if self.cache is None:
            return Acquired(source, None)
        try:
            async with asyncio.timeout(self._copy_timeout_s):
                lease = await self._cached(self.cache, source, told)
        except CacheFull as error:
            _log.warning("the model is read where it lies", reason=str(error))
            _acquired.add(1, {"origin": "direct"})
            return Acquired(source, None)
        except TimeoutError:
            raise CopyTimeout(f"{source.name}: not copied within {self._copy_timeout_s:g} s") from None
        except OSError as error:
            # The cache was taken away, or its disk is read-only or broken: what it spared can be done without it.
            _log.error("the model cache cannot be used, the model is read where it lies", reason=str(error))
            _failures.add(1, {"origin": "cache"})
            _acquired.add(1, {"origin": "direct"})
            return Acquired(source, None)
        return Acquired(ModelSource(source.name, lease.path), lease)

    @contextlib.asynccontextmanager
    async def announced(self, acquired: Acquired) -> AsyncIterator[None]:
        """Let other workers copy from here meanwhile."""
        if acquired.lease is None:
            yield
            return
        announcing = asyncio.create_task(self._places.announce(acquired.lease.digest))
        try:
            yield
        finally:
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)

    async def drop_if_damaged(self, acquired: Acquired) -> bool:
        """Close a cached artifact that a load has refused, and remove it if its files differ; whether they did."""
        cache, lease = self.cache, acquired.lease
        if cache is None or lease is None:
            return False
        try:
            manifest = await asyncio.to_thread(read_manifest, lease.path)
            if manifest is not None:
                await in_thread(lambda stop: verify_artifact(lease.path, manifest, stop=stop))
                return False
        except InvalidArtifact as error:
            _damaged.add(1)
            _log.error("a cached model is damaged and removed", digest=lease.digest, reason=str(error))
        finally:
            lease.close()
        try:
            return await asyncio.to_thread(cache.remove, lease.digest)
        except OSError as error:
            _log.error("a cached model cannot be removed", digest=lease.digest, reason=str(error))
            return False

    async def _cached(self, cache: ModelCache, source: ModelSource, told: Callable[[int, int], None]) -> Lease:
        manifest = await asyncio.to_thread(read_manifest, source.path)
        key = manifest.digest if manifest else await asyncio.to_thread(source_fingerprint, source.path)
        while True:
            lease = await _present(cache, manifest, key)
            if lease is not None:
                _acquired.add(1, {"origin": "cache"})
                return lease
            held = await owned(lambda: cache.try_copying(key))
            if held is not None:
                return await self._copy(cache, source, manifest, key, held, told)
            await asyncio.sleep(_POLL_S)

    async def _copy(
        self,
        cache: ModelCache,
        source: ModelSource,
        manifest: Manifest | None,
        key: str,
        held: FileLock,
        told: Callable[[int, int], None],
    ) -> Lease:
        with held:
            # It may have been finished between the look and the lock.
            lease = await _present(cache, manifest, key)
            if lease is not None:
                return lease
            started_s = time.monotonic()
            size = manifest.size if manifest else await asyncio.to_thread(_source_bytes, source.path)
            progress = _Counted(size, told)
            lease, origin = await self._from_anywhere(cache, source, manifest, progress)
            if manifest is None:
                await asyncio.to_thread(cache.remember, key, lease.digest)
            took_s = time.monotonic() - started_s
            _copied.add(size, {"origin": origin})
            _acquired.add(1, {"origin": origin})
            _log.info("model copied", model=source.name, origin=origin, bytes=size, seconds=round(took_s, 2))
            return lease

    async def _from_anywhere(
        self, cache: ModelCache, source: ModelSource, manifest: Manifest | None, progress: _Counted
    ) -> tuple[Lease, str]:
        while True:
            if manifest is not None:
                lease = await self._from_peers(cache, source, manifest, progress)
                if lease is not None:
                    return lease, "peer"
            if await self._places.try_read(self._source_readers):
                async with self._places.reading(self._source_readers):
                    return await self._with_a_place(cache, source, manifest, progress)
            await asyncio.sleep(retry_pause_s())

    async def _with_a_place(
        self, cache: ModelCache, source: ModelSource, manifest: Manifest | None, progress: _Counted
    ) -> tuple[Lease, str]:
        """Copy from the source, unless somebody has got it while the place was waited for."""
        if manifest is not None:
            lease = await self._from_peers(cache, source, manifest, progress)
            if lease is not None:
                return lease, "peer"
        progress.reset()
        lease = await self._from_source(cache, source, manifest, progress)
        await self._places.add_holder(lease.digest)
        return lease, "source"

    async def _from_peers(
        self, cache: ModelCache, source: ModelSource, manifest: Manifest, progress: _Counted
    ) -> Lease | None:
        peers = await self._places.holders(manifest.digest)
        if not peers:
            return None
        progress.reset()
        copy = PeerCopy(cache, manifest, self._secret, progress.add)
        try:
            return await copy.run(peers[:_MAX_PEERS], entry_info(source.name, source.path))
        except CopyFailed as error:
            _failures.add(1, {"origin": "peer"})
            _log.warning("no copy from other workers", model=source.name, reason=str(error))
            return None

    async def _from_source(
        self, cache: ModelCache, source: ModelSource, manifest: Manifest | None, progress: _Counted
    ) -> Lease:
        before = await asyncio.to_thread(source_fingerprint, source.path)
        try:
            lease = await in_thread(
                lambda stop: copy_from_source(
                    cache, source.name, source.path, manifest, progress=progress.add, stop=stop
                )
            )
        except ArtifactError:
            _failures.add(1, {"origin": "source"})
            raise
        if manifest is None and await asyncio.to_thread(source_fingerprint, source.path) != before:
            lease.close()
            raise CopyFailed(f"{source.name}: changed while it was copied")
        return lease


class _Counted:
    """Bytes of a copy, added by many threads."""

    def __init__(self, size: int, told: Callable[[int, int], None]) -> None:
        self._size = size
        self._told = told
        self._lock = threading.Lock()
        self._done = 0

    def reset(self) -> None:
        """A new try begins at nothing."""
        self._done = 0
        self._told(0, self._size)

    def add(self, count: int) -> None:
        """So many bytes more."""
        with self._lock:
            self._done += count
            self._told(self._done, self._size)


async def _present(cache: ModelCache, manifest: Manifest | None, key: str) -> Lease | None:
    digest = manifest.digest if manifest else await asyncio.to_thread(cache.known_digest, key)
    return await owned(lambda: cache.lease(digest)) if digest else None


def _source_bytes(path: Path) -> int:
    root = artifact_root(path)
    return sum(file_size(root / name) for name in artifact_files(path))
