"""Reading in chunks: every byte where it belongs, every difference found and named."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import pytest

from services.common.artifacts.chunk_reader import CHUNK_BYTES, FileDigest, FileRead, num_chunks, read_files
from services.common.artifacts.errors import InvalidArtifact

SIZES = (0, 1, 4097, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 12345)


def write(path: Path, size: int) -> bytes:
    data = os.urandom(size)
    path.write_bytes(data)
    return data


@pytest.mark.parametrize("threads", [1, 4])
def test_bytes_and_digests(tmp_path: Path, threads: int) -> None:
    contents = [write(tmp_path / str(size), size) for size in SIZES]
    memory = [bytearray(size) for size in SIZES]
    told: list[int] = []
    reads = [
        FileRead(tmp_path / str(size), size, into=lambda offset, count, m=m: [memoryview(m)[offset : offset + count]])
        for size, m in zip(SIZES, memory, strict=True)
    ]
    digests = read_files(reads, threads=threads, progress=told.append)
    assert [bytes(one) for one in memory] == contents
    assert sum(told) == sum(SIZES)
    for data, found in zip(contents, digests, strict=True):
        parts = [data[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES] for i in range(num_chunks(len(data)))]
        assert found == FileDigest(len(data), tuple(hashlib.sha256(part).digest() for part in parts))
    assert len({one.digest for one in digests}) == len(SIZES)
    again = [FileRead(read.path, read.size, one.chunks) for read, one in zip(reads, digests, strict=True)]
    assert read_files(again, threads=threads) == digests


def test_many_buffers_for_one_chunk(tmp_path: Path) -> None:
    """More than one preadv takes, some of them empty."""
    data = write(tmp_path / "f", 5000)
    pieces = [bytearray(3 * (i % 2)) for i in range(3000)] + [bytearray(500)]
    read_files([FileRead(tmp_path / "f", 5000, into=lambda offset, size: [memoryview(one) for one in pieces])])
    assert b"".join(pieces) == data


@pytest.mark.parametrize("position", [0, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 99])
def test_a_flipped_bit_is_found_and_named(tmp_path: Path, position: int) -> None:
    size = 2 * CHUNK_BYTES + 100
    data = bytearray(write(tmp_path / "f", size))
    (good,) = read_files([FileRead(tmp_path / "f", size)])
    data[position] ^= 0x10
    (tmp_path / "f").write_bytes(data)
    handed_on: list[int] = []
    read = FileRead(tmp_path / "f", size, good.chunks, then=lambda offset, buffers: handed_on.append(offset))
    with pytest.raises(InvalidArtifact, match=f"^f: chunk {position // CHUNK_BYTES} .*differs"):
        read_files([read])
    assert position // CHUNK_BYTES * CHUNK_BYTES not in handed_on


def test_other_sizes_and_no_file(tmp_path: Path) -> None:
    write(tmp_path / "f", 1000)
    with pytest.raises(InvalidArtifact, match="f: 1000 bytes, 1001 are expected"):
        read_files([FileRead(tmp_path / "f", 1001)])
    with pytest.raises(InvalidArtifact, match="absent: No such file"):
        read_files([FileRead(tmp_path / "absent", 1)])
    with pytest.raises(InvalidArtifact, match="2 chunks, not 1"):
        read_files([FileRead(tmp_path / "f", 1000, [b"", b""])])


def test_a_file_cut_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write(path, 3 * CHUNK_BYTES)

    def cut(offset: int, size: int) -> list[memoryview]:
        os.truncate(path, CHUNK_BYTES + 5)
        return [memoryview(bytearray(size))]

    with pytest.raises(InvalidArtifact, match=f"f: ends at byte {CHUNK_BYTES + 5} while it is read"):
        read_files([FileRead(path, 3 * CHUNK_BYTES, into=cut)], threads=1)


def test_giving_up(tmp_path: Path) -> None:
    write(tmp_path / "f", 4 * CHUNK_BYTES)
    stop, told = threading.Event(), list[int]()

    def progress(count: int) -> None:
        told.append(count)
        stop.set()

    with pytest.raises(InvalidArtifact, match="given up"):
        read_files([FileRead(tmp_path / "f", 4 * CHUNK_BYTES)], threads=1, progress=progress, stop=stop)
    assert told == [CHUNK_BYTES]
