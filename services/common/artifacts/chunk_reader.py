"""Files read in chunks by several threads, digested on the way: one pass for bytes and proof.

A chunk is CHUNK_BYTES of a file at a multiple of it. Its digest is SHA-256 of its bytes, a file's digest SHA-256 over
its size and its chunks' digests, so that one file keeps all threads busy. Threads read with preadv straight into the
memory that the caller gives for a range of the file; neither reading nor digesting holds the interpreter's lock. The
first error stops all threads.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from services.common.artifacts.errors import InvalidArtifact
from services.common.artifacts.regular_file import open_regular

# Part of every digest: another size is another format (manifest.py).
CHUNK_BYTES = 8 * 2**20
# Buffers of one preadv call; the kernel takes 1024.
_MAX_BUFFERS = 512

Buffers = Sequence[memoryview]
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class FileRead:
    """One file to read.

    size: its bytes; another size on the disk is refused. expected: digests of its chunks, None where nobody knows
    them. into(offset, size): writable memory for that range, in order and of that total size; None: memory of the
    reading thread, used again for its next chunk. then(offset, buffers): told of a chunk that has been read and, where
    `expected` is there, verified. chunks: which are read, None: all; the digests of others are empty.
    """

    path: Path
    size: int
    expected: Sequence[bytes] | None = None
    into: Callable[[int, int], Buffers] | None = None
    then: Callable[[int, Buffers], None] | None = None
    chunks: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class FileDigest:
    """What was read of a file."""

    size: int
    chunks: tuple[bytes, ...]

    @property
    def digest(self) -> bytes:
        """32 bytes over size and contents."""
        return hashlib.sha256(self.size.to_bytes(8, "little") + b"".join(self.chunks)).digest()


def num_chunks(size: int) -> int:
    """How many chunks a file of `size` bytes has; an empty file has one, so that it has a digest."""
    return max(1, -(-size // CHUNK_BYTES))


def reading_threads() -> int:
    """Threads that keep disk and cores busy: two for each core, as one waits while the other digests."""
    return min(32, 2 * len(os.sched_getaffinity(0)))


def read_files(
    reads: Sequence[FileRead],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> list[FileDigest]:
    """Read all files; their digests in the same order.

    progress: told the bytes of each chunk, from any thread. stop: set by whoever gives up; the read ends within a
    chunk with InvalidArtifact. Raises InvalidArtifact naming file and chunk when a file is missing, has another size,
    ends early or differs from `expected`.
    """
    return _Reader(reads, progress, stop or threading.Event(), threads or reading_threads()).run()


class _Reader:
    """One pass."""

    def __init__(
        self, reads: Sequence[FileRead], progress: Progress | None, stop: threading.Event, threads: int
    ) -> None:
        self._reads = reads
        self._threads = threads
        self._progress = progress
        self._stop = stop
        self._failed = threading.Event()
        self._local = threading.local()

    def run(self) -> list[FileDigest]:
        with ExitStack() as stack:
            descriptors = [self._open(read, stack) for read in self._reads]
            found: list[list[bytes]] = [[b""] * num_chunks(read.size) for read in self._reads]
            # The context waits for every thread before the descriptors are closed.
            with ThreadPoolExecutor(self._threads, thread_name_prefix="chunk-reader") as pool:
                list(pool.map(lambda one: self._chunk(descriptors, found, *one), self._plan()))
        return [FileDigest(read.size, tuple(chunks)) for read, chunks in zip(self._reads, found, strict=True)]

    def _open(self, read: FileRead, stack: ExitStack) -> int:
        try:
            descriptor = open_regular(read.path)
        except OSError as error:
            raise InvalidArtifact(f"{read.path.name}: {error.strerror}") from None
        stack.callback(os.close, descriptor)
        size = os.fstat(descriptor).st_size
        if size != read.size:
            raise InvalidArtifact(f"{read.path.name}: {size} bytes, {read.size} are expected")
        if read.expected is not None and len(read.expected) != num_chunks(size):
            raise InvalidArtifact(f"{read.path.name}: digests of {len(read.expected)} chunks, not {num_chunks(size)}")
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return descriptor

    def _plan(self) -> Iterator[tuple[int, int]]:
        for number, read in enumerate(self._reads):
            for index in range(num_chunks(read.size)) if read.chunks is None else read.chunks:
                yield number, index

    def _chunk(self, descriptors: list[int], found: list[list[bytes]], number: int, index: int) -> None:
        if self._failed.is_set():
            return
        try:
            found[number][index] = self._read_chunk(self._reads[number], descriptors[number], index)
        except BaseException:
            self._failed.set()
            raise

    def _read_chunk(self, read: FileRead, descriptor: int, index: int) -> bytes:
        if self._stop.is_set():
            raise InvalidArtifact(f"{read.path.name}: reading was given up")
        offset = index * CHUNK_BYTES
        size = min(CHUNK_BYTES, read.size - offset)
        buffers = read.into(offset, size) if read.into is not None else [self._scratch()[:size]]
        _read_exactly(read.path, descriptor, buffers, offset)
        if read.chunks is None:
            # What this thread is likely to read next comes while it digests.
            os.posix_fadvise(descriptor, offset + self._threads * CHUNK_BYTES, CHUNK_BYTES, os.POSIX_FADV_WILLNEED)
        digest = chunk_digest(buffers)
        if read.expected is not None and digest != read.expected[index]:
            raise InvalidArtifact(
                f"{read.path.name}: chunk {index} (bytes {offset} to {offset + size}) differs from its manifest"
            )
        if read.then is not None:
            read.then(offset, buffers)
        if self._progress is not None:
            self._progress(size)
        return digest

    def _scratch(self) -> memoryview:
        found: memoryview | None = getattr(self._local, "scratch", None)
        if found is None:
            found = self._local.scratch = memoryview(bytearray(CHUNK_BYTES))
        return found


def chunk_digest(buffers: Buffers) -> bytes:
    """SHA-256 of buffers one after the other."""
    digest = hashlib.sha256()
    for buffer in buffers:
        digest.update(buffer)
    return digest.digest()


def _read_exactly(path: Path, descriptor: int, buffers: Buffers, offset: int) -> None:
    """Fill all buffers from `offset` on; the kernel may give less than asked. Raises InvalidArtifact."""
    left = [buffer for buffer in buffers if len(buffer)]
    while left:
        try:
            count = os.preadv(descriptor, left[:_MAX_BUFFERS], offset)
        except OSError as error:
            raise InvalidArtifact(f"{path.name}: cannot be read at byte {offset}: {error.strerror}") from None
        if count == 0:
            raise InvalidArtifact(f"{path.name}: ends at byte {offset} while it is read")
        offset += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
