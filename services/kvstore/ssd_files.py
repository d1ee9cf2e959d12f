"""Segment files: few, large, preallocated, private to the node's user, and past the page cache.

Reads and writes go through O_DIRECT where the file system has it, else the cache is told to drop what was touched.
Buffers, offsets and lengths are whole pages. Everything here blocks, raises OSError and runs in threads.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog
from opentelemetry import metrics

from services.kvstore.ssd_format import (
    PAGE_BYTES,
    NotAFrame,
    SegmentHeader,
    decode_segment_header,
    encode_segment_header,
    padded,
)

# Largest single write; a process that is killed may leave any number of whole ones.
WRITE_BYTES = 8 * 2**20
_NAME = re.compile(r"segment-(\d{10})\.kv")
_log = structlog.get_logger()
_discarded = metrics.get_meter("kvmesh.kvstore").create_counter(
    "kvmesh_kvstore_ssd_discarded_segments", description="Files of another format, or damaged, deleted at the start."
)


class DirectoryInUse(Exception):
    """Another node has the directory."""


class PageBuffer:
    """Page-aligned memory that grows. One user at a time."""

    def __init__(self) -> None:
        self._memory = memoryview(mmap.mmap(-1, PAGE_BYTES))

    def take(self, num_bytes: int) -> memoryview:
        """At least `num_bytes`, rounded up to pages; what it held is gone."""
        size = padded(num_bytes)
        if len(self._memory) < size:
            self._memory = memoryview(mmap.mmap(-1, size))
        return self._memory[:size]


class _ThreadBuffers(threading.local):
    def __init__(self) -> None:
        self.buffer = PageBuffer()


_scratch = _ThreadBuffers()


def scratch(num_bytes: int) -> memoryview:
    """Page-aligned memory of this thread, good until the next call."""
    return _scratch.buffer.take(num_bytes)


class SegmentFile:
    """An open segment. Closing twice is allowed."""

    def __init__(self, path: Path, fd: int, header: SegmentHeader, *, direct: bool) -> None:
        self.header = header
        self.path = path
        self._fd = fd
        self._direct = direct

    def write(self, offset: int, data: memoryview, *, between: Callable[[], None], chunk_bytes: int) -> None:
        """Write whole pages; `between` is called after each chunk but the last."""
        done = 0
        while done < len(data):
            if done:
                between()
            done += _all_written(os.pwrite(self._fd, data[done : done + chunk_bytes], offset + done))

    def sync(self) -> None:
        """What was written is durable."""
        os.fdatasync(self._fd)
        self._forget(0, 0)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`; what lies past the end reads as zeros."""
        done = 0
        while done < len(buffer):
            count = os.preadv(self._fd, [buffer[done:]], offset + done)
            if count == 0:
                buffer[done:] = bytes(len(buffer) - done)
                break
            done += count
        self._forget(offset, len(buffer))

    def cut(self, offset: int) -> None:
        """Everything from `offset` on is zeros again."""
        os.ftruncate(self._fd, offset)
        os.posix_fallocate(self._fd, 0, self.header.num_bytes)
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _forget(self, offset: int, length: int) -> None:
        if not self._direct:
            os.posix_fadvise(self._fd, offset, length, os.POSIX_FADV_DONTNEED)


class SegmentDirectory:
    """The directory, locked for this process until `close`. Raises OSError or DirectoryInUse."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
        self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise DirectoryInUse(str(path)) from None

    def existing(self) -> Iterator[SegmentFile]:
        """Segments from earlier runs, oldest first; a file that is none is deleted."""
        _discarded.add(0)
        for name in sorted(name for name in os.listdir(self.path) if _NAME.fullmatch(name)):
            path = self.path / name
            fd, direct = _open(path, os.O_RDWR)
            page = scratch(PAGE_BYTES)
            segment = SegmentFile(path, fd, SegmentHeader(0, 0), direct=direct)
            segment.read_into(0, page)
            try:
                segment.header = decode_segment_header(page)
                if name != _name(segment.header.sequence) or os.fstat(fd).st_size > segment.header.num_bytes:
                    raise NotAFrame("name or size")
            except NotAFrame as reason:
                _discarded.add(1)
                _log.warning("a segment is discarded", file=name, reason=str(reason))
                self.remove(segment)
            else:
                yield segment

    def create(self, sequence: int, num_bytes: int) -> SegmentFile:
        """A new segment with all its space; leaves nothing behind when that fails."""
        path = self.path / _name(sequence)
        fd, direct = _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        header = SegmentHeader(sequence, num_bytes)
        segment = SegmentFile(path, fd, header, direct=direct)
        try:
            os.posix_fallocate(fd, 0, num_bytes)
            page = scratch(PAGE_BYTES)
            page[:] = encode_segment_header(header)
            segment.write(0, page, between=lambda: None, chunk_bytes=PAGE_BYTES)
            segment.sync()
            self._sync()
        except OSError:
            self.remove(segment)
            raise
        return segment

    def remove(self, segment: SegmentFile) -> None:
        """Close and delete; its space is free when this returns."""
        segment.close()
        segment.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let another process have it."""
        os.close(self._lock)

    def _sync(self) -> None:
        fd = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _name(sequence: int) -> str:
    return f"segment-{sequence:010d}.kv"


def _open(path: Path, flags: int) -> tuple[int, bool]:
    """The descriptor, and whether it goes past the page cache."""
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Some kernels refuse O_DIRECT only after they have made the file.
        return os.open(path, flags & ~os.O_EXCL | os.O_CLOEXEC, 0o600), False


def _all_written(count: int) -> int:
    if count <= 0 or count % PAGE_BYTES:
        raise OSError(errno.ENOSPC, "short write")
    return count
