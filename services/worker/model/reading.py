"""Weight files into memory: every tensor in memory of its own, filled and digested in one parallel pass.

A tensor's bytes go straight from the file to where they stay: what a source hands out are views of them. Memory is
apart for each tensor, so that what is converted and dropped is given back while the rest stays.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from services.common.artifacts.chunk_reader import CHUNK_BYTES, Buffers, FileDigest, FileRead, Progress, read_files
from services.common.artifacts.errors import InvalidArtifact
from services.common.artifacts.manifest import Manifest, expected_entries, file_size, weights_digest
from services.worker.model.errors import InvalidWeights


@dataclass(frozen=True, slots=True)
class Extent:
    """The bytes of one tensor in a file."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file and its tensors, which do not overlap; what lies between them is read for the digest alone."""

    path: Path
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """tensors: uint8 [bytes] by name. digest: 16 bytes over the contents of all files in their order. size: bytes."""

    tensors: Mapping[str, torch.Tensor]
    digest: bytes
    size: int


@dataclass(frozen=True, slots=True)
class SharedReading:
    """What one of several readers reads, and how it gets the other chunks' digests.

    chunks: of each file the numbers of those that it reads. merge: called once, with the digests of these.
    """

    chunks: Sequence[Sequence[int]]
    merge: Callable[[list[FileDigest]], list[FileDigest]]


def touched_chunks(file: WeightFile) -> set[int]:
    """The chunks of a file that hold bytes of its extents."""
    return {
        chunk
        for one in file.extents
        if one.size
        for chunk in range(one.offset // CHUNK_BYTES, (one.offset + one.size - 1) // CHUNK_BYTES + 1)
    }


def read_weights(
    files: Sequence[WeightFile],
    manifest: Manifest | None = None,
    *,
    progress: Progress | None = None,
    pinned: bool = False,
    threads: int | None = None,
    share: SharedReading | None = None,
) -> LoadedWeights:
    """Read all files. manifest: what they must be, where that is known. pinned: memory that a GPU copies from.

    progress: told the bytes read, from any thread. share: where several processes read the files together. Raises
    InvalidWeights naming the file, and the chunk that differs; then nothing of it is used. Files of the manifest that
    hold no weights (configuration, tokenizer) are verified too.
    """
    tensors = {
        extent.name: torch.empty(extent.size, dtype=torch.uint8, pin_memory=pinned)
        for file in files
        for extent in file.extents
    }
    try:
        reads = _reads(files, manifest, tensors)
        if share is not None:
            reads = [replace(read, chunks=chunks) for read, chunks in zip(reads, share.chunks, strict=True)]
        digests = read_files(reads, progress=progress, threads=threads)
        if share is not None:
            digests = share.merge(digests)
        if manifest is not None:
            _verify_others(files, manifest)
    except InvalidArtifact as error:
        raise InvalidWeights(str(error)) from None
    return LoadedWeights(tensors, weights_digest(digests), sum(one.size for one in digests))


def _reads(
    files: Sequence[WeightFile], manifest: Manifest | None, tensors: Mapping[str, torch.Tensor]
) -> list[FileRead]:
    entries = None if manifest is None else expected_entries(manifest, [file.path for file in files])
    reads = []
    for number, file in enumerate(files):
        size = file_size(file.path) if entries is None else entries[number].size
        expected = None if entries is None else entries[number].expected
        reads.append(FileRead(file.path, size, expected, _Scatter(file.extents, tensors).buffers))
    return reads


def _verify_others(files: Sequence[WeightFile], manifest: Manifest) -> None:
    weights = {file.path.name for file in files}
    read_files([read for read in manifest.reads(files[0].path.parent) if read.path.name not in weights])


class _Scatter:
    """Where the bytes of one file go."""

    def __init__(self, extents: Sequence[Extent], tensors: Mapping[str, torch.Tensor]) -> None:
        self._extents = sorted((one for one in extents if one.size), key=lambda one: one.offset)
        self._starts = [extent.offset for extent in self._extents]
        self._memory = [tensors[extent.name].numpy().data for extent in self._extents]

    def buffers(self, offset: int, size: int) -> Buffers:
        """Memory for a range of the file: tensors' own, and memory to forget for headers and padding."""
        found: list[memoryview] = []
        end = offset + size
        index = max(0, bisect_right(self._starts, offset) - 1)
        while offset < end:
            extent = self._extents[index] if index < len(self._extents) else None
            if extent is not None and offset >= extent.offset + extent.size:
                index += 1
                continue
            if extent is None or offset < extent.offset:
                stop = min(end, end if extent is None else extent.offset)
                found.append(memoryview(bytearray(stop - offset)))
            else:
                stop = min(end, extent.offset + extent.size)
                found.append(self._memory[index][offset - extent.offset : stop - extent.offset])
            offset = stop
        return found
