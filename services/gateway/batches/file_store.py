"""The files of all tenants, in the directory that gateways share. Blocking: callers are threads.

A file's bytes are complete before its record appears, and its record goes before they do. Nothing is ever rewritten, so
gateways need no lock: who reads a file that another deletes goes on reading it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from services.common.durable_file import sync_path
from services.gateway.batches.durable import (
    create,
    is_temporary,
    make_folder,
    publish,
    read_record,
    temporary_beside,
)
from services.gateway.batches.layout import Layout, is_file_id, new_file_id
from services.gateway.batches.records import FileRecord
from services.gateway.errors import FileTooLarge, ObjectNotFound, StorageQuotaExceeded

_RECORD = ".json"
# Its writer is gone: uploads end within the edge's limit of time.
_STALE_S = 3600.0
# Between looks at what all files of a tenant take, while one more is being written.
_LOOK_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class FileLimits:
    """max_bytes: of one file. max_tenant_bytes, max_tenant_files: of all of a tenant. life_s: unless a client says."""

    max_bytes: int
    max_tenant_bytes: int
    max_tenant_files: int
    life_s: float


class FileStore:
    """Methods raise OSError, and what else they say."""

    def __init__(self, layout: Layout, limits: FileLimits) -> None:
        self.layout = layout
        self.limits = limits

    def begin(self, tenant: str) -> Upload:
        """A file that is being written. Raises StorageQuotaExceeded."""
        make_folder(self.layout.files(tenant))
        self.check_quota(tenant, new_files=1)
        return Upload(self, tenant)

    def check_quota(self, tenant: str, *, new_files: int = 0) -> None:
        """Raise StorageQuotaExceeded where a tenant has more than it may, or would have with so many files more."""
        used_bytes, count = self.used(tenant)
        if count + new_files > self.limits.max_tenant_files:
            raise StorageQuotaExceeded(f"this tenant has {count} files, as many as it may; delete some")
        self.check_room(used_bytes)

    def check_room(self, used_bytes: int) -> None:
        """Raise StorageQuotaExceeded where a tenant uses more than it may."""
        if used_bytes > self.limits.max_tenant_bytes:
            raise StorageQuotaExceeded(
                f"the files of this tenant may take {self.limits.max_tenant_bytes} bytes together; delete some"
            )

    def used(self, tenant: str) -> tuple[int, int]:
        """Bytes of a tenant's files, those being written included, and the number of those that are complete."""
        used_bytes, count = 0, 0
        for entry in _entries(self.layout.files(tenant)):
            if entry.name.endswith(_RECORD):
                count += 1
            else:
                used_bytes += _size(entry)
        return used_bytes, count

    def get(self, tenant: str, file_id: str, now_s: float) -> FileRecord:
        """Raises ObjectNotFound. now_s: Unix time."""
        record = read_record(self._record_path(tenant, file_id), FileRecord) if is_file_id(file_id) else None
        if record is None or record.is_expired(now_s):
            raise ObjectNotFound(f"No such File object: {file_id[:64]}", "id")
        return record

    def all(self, tenant: str, now_s: float) -> list[FileRecord]:
        """The newest first."""
        found = (record for record in self._records(tenant) if not record.is_expired(now_s))
        return sorted(found, key=lambda record: (record.created_at, record.id), reverse=True)

    def open(self, tenant: str, file_id: str, now_s: float) -> BinaryIO:
        """Its bytes. Raises ObjectNotFound."""
        self.get(tenant, file_id, now_s)
        try:
            return self.path(tenant, file_id).open("rb")
        except FileNotFoundError:
            raise ObjectNotFound(f"No such File object: {file_id}", "id") from None

    def path(self, tenant: str, file_id: str) -> Path:
        """Where its bytes are. file_id: a valid one."""
        return self.layout.files(tenant) / file_id

    def add(self, tenant: str, record: FileRecord, written: Path) -> None:
        """Make a file of bytes that are complete and on disk; nothing where there is one of its id."""
        publish(written, self.path(tenant, record.id))
        create(self._record_path(tenant, record.id), msgspec.json.encode(record))

    def delete(self, tenant: str, file_id: str, now_s: float) -> None:
        """Raises ObjectNotFound. A batch that has begun with it goes on."""
        self.get(tenant, file_id, now_s)
        self.discard(tenant, file_id)

    def discard(self, tenant: str, file_id: str) -> None:
        """Remove what there is of a file."""
        self._record_path(tenant, file_id).unlink(missing_ok=True)
        self.path(tenant, file_id).unlink(missing_ok=True)

    def sweep(self, tenant: str, now_s: float) -> int:
        """Remove what has expired, and what a writer that died has left; how many files have expired."""
        expired = [record for record in self._records(tenant) if record.is_expired(now_s)]
        for record in expired:
            self.discard(tenant, record.id)
        folder = self.layout.files(tenant)
        for entry in _entries(folder):
            if _is_stale(entry, now_s) and (
                is_temporary(entry.name)
                or (not entry.name.endswith(_RECORD) and not (folder / f"{entry.name}{_RECORD}").exists())
            ):
                (folder / entry.name).unlink(missing_ok=True)
        return len(expired)

    def _records(self, tenant: str) -> Iterator[FileRecord]:
        folder = self.layout.files(tenant)
        for entry in _entries(folder):
            if entry.name.endswith(_RECORD) and not is_temporary(entry.name):
                record = read_record(folder / entry.name, FileRecord)
                if record is not None:
                    yield record

    def _record_path(self, tenant: str, file_id: str) -> Path:
        return self.layout.files(tenant) / f"{file_id}{_RECORD}"


class Upload:
    """One file while it is written: `write` until all is there, then `finish`; `discard` in any case, at the end."""

    def __init__(self, store: FileStore, tenant: str) -> None:
        self._store = store
        self._tenant = tenant
        self._id = new_file_id()
        self._path = temporary_beside(store.path(tenant, self._id))
        self._file = os.fdopen(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        self._size = 0
        self._looked_at = 0

    def write(self, data: bytes) -> None:
        """Raises FileTooLarge or StorageQuotaExceeded."""
        self._size += len(data)
        limits = self._store.limits
        if self._size > limits.max_bytes:
            raise FileTooLarge(f"a file has at most {limits.max_bytes} bytes", "file")
        self._file.write(data)
        if self._size - self._looked_at >= _LOOK_BYTES:
            self._check_room()

    def finish(self, filename: str, purpose: str, now_s: float, life_s: float) -> FileRecord:
        """Make it a file of its tenant. now_s: Unix time. Raises StorageQuotaExceeded."""
        self._check_room()
        os.fsync(self._file.fileno())
        record = FileRecord(
            id=self._id,
            filename=filename,
            purpose=purpose,
            bytes=self._size,
            created_at=int(now_s),
            expires_at=int(now_s + life_s),
        )
        self._store.add(self._tenant, record, self._path)
        return record

    def discard(self) -> None:
        """Remove what is not finished. Idempotent."""
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _check_room(self) -> None:
        self._file.flush()
        self._looked_at = self._size
        self._store.check_room(self._store.used(self._tenant)[0])


def remove_folder(folder: Path) -> None:
    """With the files in it; nothing where there is none."""
    for entry in _entries(folder):
        (folder / entry.name).unlink(missing_ok=True)
    if folder.exists():
        folder.rmdir()
        sync_path(folder.parent)


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            yield from found
    except FileNotFoundError:
        return


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except FileNotFoundError:
        return 0


def _is_stale(entry: os.DirEntry[str], now_s: float) -> bool:
    try:
        return now_s - entry.stat().st_mtime > _STALE_S
    except FileNotFoundError:
        return False
