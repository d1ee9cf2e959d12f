"""A copy on its way into the cache: files of known sizes in a directory that nobody else looks into."""

from __future__ import annotations

import os
from pathlib import Path

from services.common.artifacts.chunk_reader import Buffers
from services.common.artifacts.errors import CopyFailed
from services.common.artifacts.file_lock import FileLock
from services.common.durable_file import sync_path


class Staging:
    """A copy under way: space reserved, unseen by others until `ModelCache.commit`."""

    def __init__(self, folder: Path, held: FileLock) -> None:
        self.folder = folder
        self._held = held
        self._open: dict[str, int] = {}

    def write(self, name: str, offset: int, buffers: Buffers) -> None:
        """Write a part of a file, made by `create`; from any thread. Raises CopyFailed."""
        try:
            for buffer in buffers:
                position = 0
                while position < len(buffer):
                    position += os.pwrite(self._open[name], buffer[position:], offset + position)
                offset += len(buffer)
        except OSError as error:
            raise CopyFailed(f"{name}: cannot be written: {error.strerror}") from None

    def create(self, name: str, size: int) -> None:
        """Make a file of a size. Raises CopyFailed, also where the disk is full."""
        try:
            descriptor = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._open[name] = descriptor
            if size:
                os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            raise CopyFailed(f"{name}: cannot be written: {error.strerror}") from None

    def sync(self) -> None:
        """Everything written is on the disk. Raises CopyFailed."""
        try:
            for descriptor in self._open.values():
                os.fsync(descriptor)
            sync_path(self.folder)
        except OSError as error:
            raise CopyFailed(f"{self.folder.name}: cannot be written: {error.strerror}") from None

    def close(self) -> None:
        """Close files and let go of the lock; what is still in place is anybody's to remove. Idempotent."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
        self._held.close()
