"""Artifacts kept on this machine: complete, verified, bounded in size, the least recently used going first.

    DIR/lock               held for a moment around every change of what is there
    DIR/entries/DIGEST/    one artifact: its files, its manifest, .kvmesh-entry.json; appears whole, by a rename
    DIR/leases/DIGEST      locked (shared) by whoever uses the entry; its time is the last use
    DIR/staging/…/         copies under way, each locked by its process, and what is being deleted
    DIR/copying/KEY        locked by whoever copies an artifact, so that others wait for it
    DIR/known/FINGERPRINT  digest of a source that has no manifest

All processes of a machine share one directory without talking to each other: locks die with their process, so a crash
leaves at most a staging directory that nobody holds, which the next process removes. Bytes of entries and reservations
of copies never exceed max_bytes. An entry in use is never removed. Calls block on the disk: run them in a thread.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from services.common.artifacts.chunk_reader import num_chunks
from services.common.artifacts.errors import ArtifactError, CacheFull, CopyFailed
from services.common.artifacts.file_lock import FileLock, lock, try_lock
from services.common.artifacts.manifest import Manifest, write_manifest
from services.common.artifacts.staging import Staging
from services.common.durable_file import sync_path

ENTRY_INFO = ".kvmesh-entry.json"
_LOCK_TIMEOUT_S = 30.0
_SIZE_FILE, _LOCK_FILE = ".size", ".lock"
# Room for what stands beside the files: the entry's own, and the manifest's lines of each file and chunk.
_INFO_BYTES, _FILE_BYTES, _CHUNK_BYTES = 8192, 512, 80
_log = structlog.get_logger()


class EntryInfo(msgspec.Struct, frozen=True):
    """Of an entry: the model's name, the GGUF file (empty: the whole folder), and where it came from."""

    name: str
    file: str
    source: str


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """An artifact that is here. path: the folder or the GGUF file. size: bytes on the disk, manifest included."""

    digest: str
    info: EntryInfo
    path: Path
    size: int
    last_used_s: float
    in_use: bool


@dataclass(slots=True)
class Lease:
    """The right to use an entry: it stays while this is held."""

    digest: str
    path: Path
    _lock: FileLock

    def close(self) -> None:
        """Use it no longer. Idempotent."""
        self._lock.close()


class ModelCache:
    """One directory, as one process sees it."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Make the directory and remove what crashed copies left. Raises ArtifactError when it cannot be used."""
        self.folder = folder
        self.max_bytes = max_bytes
        try:
            for part in ("entries", "leases", "staging", "copying", "known"):
                (folder / part).mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._changing():
                left_over = self._dead_stagings()
        except OSError as error:
            raise ArtifactError(f"model cache {folder}: {error.strerror}") from None
        _delete(left_over)

    def lease(self, digest: str) -> Lease | None:
        """Use an entry; None when it is not here."""
        with self._changing():
            entry = self.folder / "entries" / digest
            if not entry.is_dir():
                return None
            info = _read_info(entry)
            held = try_lock(self._lease_file(digest), shared=True)
            if held is None:
                return None
            os.utime(self._lease_file(digest))
            return Lease(digest, entry / info.file if info.file else entry, held)

    def begin(self, sizes: Iterable[int]) -> Staging:
        """Reserve room for files of these sizes. Raises CacheFull when it cannot be made."""
        size = _INFO_BYTES + sum(size + _FILE_BYTES + _CHUNK_BYTES * num_chunks(size) for size in sizes)
        with self._changing():
            gone = [*self._dead_stagings(), *self._make_room(size)]
            folder = self.folder / "staging" / secrets.token_hex(8)
            folder.mkdir(mode=0o700)
            held = try_lock(folder / _LOCK_FILE)
            assert held is not None
            (folder / _SIZE_FILE).write_text(str(size))
        _delete(gone)
        return Staging(folder, held)

    def commit(self, staging: Staging, manifest: Manifest, info: EntryInfo) -> Lease:
        """Make a complete, verified copy an entry, and use it. Whoever was first with the same artifact stays."""
        artifact = staging.folder / info.file if info.file else staging.folder
        write_manifest(artifact, manifest)
        (staging.folder / ENTRY_INFO).write_bytes(msgspec.json.encode(info))
        sync_path(staging.folder / ENTRY_INFO)
        staging.sync()
        with self._changing():
            entry = self.folder / "entries" / manifest.digest
            if not entry.is_dir():
                staging.folder.rename(entry)
                (entry / _SIZE_FILE).unlink()
                (entry / _LOCK_FILE).unlink()
                sync_path(entry.parent)
        self.discard(staging)
        found = self.lease(manifest.digest)
        if found is None:
            raise CopyFailed(f"{info.name}: gone from the cache as soon as it was there")
        return found

    def discard(self, staging: Staging) -> None:
        """Give up a copy. Idempotent."""
        staging.close()
        _delete([staging.folder])

    def entries(self) -> list[CacheEntry]:
        """What is here, the least recently used first."""
        with self._changing():
            found = [self._entry(folder) for folder in (self.folder / "entries").iterdir()]
        return sorted(found, key=lambda entry: (entry.last_used_s, entry.digest))

    def remove(self, digest: str) -> bool:
        """Remove an entry; False when it is not here or in use."""
        with self._changing():
            gone = self._take_out(digest)
        _delete([gone] if gone else [])
        return gone is not None

    def evict(self, to_bytes: int) -> list[str]:
        """Remove least recently used entries that nobody uses until at most `to_bytes` are left; their digests."""
        digests: list[str] = []
        for entry in self.entries():
            if self.used_bytes() <= to_bytes:
                break
            if self.remove(entry.digest):
                digests.append(entry.digest)
        return digests

    def used_bytes(self) -> int:
        """Bytes of entries and of copies under way."""
        with self._changing():
            return self._used_bytes()

    def try_copying(self, key: str) -> FileLock | None:
        """Be the one who copies `key`; None while another process is."""
        return try_lock(self.folder / "copying" / key)

    def known_digest(self, fingerprint: str) -> str:
        """Digest of a source that was copied before; empty when none is known."""
        try:
            return (self.folder / "known" / fingerprint).read_text()
        except OSError:
            return ""

    def remember(self, fingerprint: str, digest: str) -> None:
        """Note the digest of a source."""
        temporary = self.folder / "known" / f".{secrets.token_hex(8)}"
        temporary.write_text(digest)
        temporary.replace(self.folder / "known" / fingerprint)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with lock(self.folder / "lock", _LOCK_TIMEOUT_S):
            yield

    def _lease_file(self, digest: str) -> Path:
        return self.folder / "leases" / digest

    def _entry(self, folder: Path) -> CacheEntry:
        info, lease = _read_info(folder), self._lease_file(folder.name)
        free = try_lock(lease)
        if free is not None:
            free.close()
        path = folder / info.file if info.file else folder
        return CacheEntry(folder.name, info, path, _folder_bytes(folder), lease.stat().st_mtime, free is None)

    def _used_bytes(self) -> int:
        entries = sum(_folder_bytes(folder) for folder in (self.folder / "entries").iterdir())
        reserved = 0
        for folder in (self.folder / "staging").iterdir():
            with contextlib.suppress(OSError, ValueError):
                reserved += int((folder / _SIZE_FILE).read_text())
        return entries + reserved

    def _make_room(self, size: int) -> list[Path]:
        """Take out entries until `size` more bytes fit; folders to delete. Raises CacheFull."""
        gone: list[Path] = []
        over = self._used_bytes() + size - self.max_bytes
        entries = [self._entry(folder) for folder in (self.folder / "entries").iterdir()] if over > 0 else []
        free = [entry for entry in entries if not entry.in_use]
        if over > 0 and over > sum(entry.size for entry in free):
            raise CacheFull(f"model cache {self.folder}: {size} bytes do not fit into {self.max_bytes}")
        for entry in sorted(free, key=lambda one: (one.last_used_s, one.digest)):
            if over <= 0:
                break
            taken = self._take_out(entry.digest)
            if taken is not None:
                gone.append(taken)
                over -= entry.size
                _log.info("model evicted", model=entry.info.name, digest=entry.digest, bytes=entry.size)
        return gone

    def _take_out(self, digest: str) -> Path | None:
        """Move an entry that nobody uses to where it can be deleted at leisure."""
        entry = self.folder / "entries" / digest
        held = try_lock(self._lease_file(digest)) if entry.is_dir() else None
        if held is None:
            return None
        with held:
            gone = self.folder / "staging" / f"gone-{secrets.token_hex(8)}"
            entry.rename(gone)
            self._lease_file(digest).unlink()
        return gone

    def _dead_stagings(self) -> list[Path]:
        """Staging directories that no living process holds."""
        dead = []
        for folder in (self.folder / "staging").iterdir():
            # What is being deleted by another process may be gone at any moment.
            with contextlib.suppress(FileNotFoundError):
                held = try_lock(folder / _LOCK_FILE)
                if held is not None:
                    held.close()
                    dead.append(folder)
        return dead


def _read_info(entry: Path) -> EntryInfo:
    try:
        return msgspec.json.decode((entry / ENTRY_INFO).read_bytes(), type=EntryInfo)
    except (OSError, msgspec.DecodeError):
        # Written before the entry appeared, so somebody else's hand was at work; still listed, and removable.
        return EntryInfo("unknown", "", "")


def _folder_bytes(folder: Path) -> int:
    total = 0
    for file in folder.iterdir():
        with contextlib.suppress(OSError):
            total += file.lstat().st_size
    return total


def _delete(folders: Iterable[Path]) -> None:
    """Another process may be deleting the same; what stays is tried again at the next start."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
