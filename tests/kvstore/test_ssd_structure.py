"""Damage at every place of the files that means something: what is served is exact, what was whole before it is there.

Frames and payloads are found with the format's own functions, the fields inside a header by the offsets listed here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.kvstore.ssd_format import (
    PAGE_BYTES,
    TAG_BYTES,
    Frame,
    NotAFrame,
    decode_frame_header,
    decode_segment_header,
    frame_header_bytes,
    frame_header_size,
)
from tests.common.transfer.blocks import chain
from tests.kvstore.ssd import flushed, opened, pull, push
from tests.kvstore.test_ssd_faults import check_all, flip

_CHAINS = 3
_CHAIN_BLOCKS = 3


@dataclass(frozen=True)
class Place:
    """An offset in a file. chain: the first one that damage there may cost; harmless: it may cost none."""

    name: str
    offset: int
    chain: int
    harmless: bool = False


async def store(path: Path, *, encrypt: bool = True) -> Path:
    """One segment with a frame for each chain; its file."""
    async with opened(path, ssd_encrypt=encrypt) as one:
        for number in range(_CHAINS):
            await push(one.store, chain(_CHAIN_BLOCKS, number))
            await flushed(one)
    (segment,) = path.glob("segment-*")
    return segment


def read_frames(segment: Path) -> list[tuple[int, Frame]]:
    """Frames and where they begin."""
    data = segment.read_bytes()
    header = decode_segment_header(data[:PAGE_BYTES])
    found, position = [], PAGE_BYTES
    while position < len(data):
        try:
            size = frame_header_size(data[position:])
        except NotAFrame:
            break
        frame = decode_frame_header(data[position : position + size], header, position)
        found.append((position, frame))
        position = frame.end
    return found


def places(segment: Path) -> Iterator[Place]:
    """Every field of the headers by its first byte, and the parts of the payloads."""
    # magic, version, page size, sequence, size, checksum
    for offset in (0, 8, 12, 16, 24, 32):
        yield Place("segment header", offset, 0)
    yield Place("segment header's padding", PAGE_BYTES - 1, 0, harmless=True)
    for number, (start, frame) in enumerate(read_frames(segment)):
        # magic, size, count, sequence, place, end
        for offset in (0, 8, 12, 16, 24, 32):
            yield Place("frame header", start + offset, number)
        first = start + 40
        # age, length of the block's header, stored size, flags, nonce, key, and the block's header itself
        for offset in (0, 8, 12, 16, 17, 29, 37, 60):
            yield Place("record", first + offset, number)
        size = frame_header_bytes(frame.records)
        yield Place("frame header's padding", start + size - 9, number)
        yield Place("frame checksum", start + size - 1, number)
        for record, offset in zip(frame.records, frame.offsets, strict=True):
            end = offset + record.stored_bytes
            yield Place("payload", offset, number)
            yield Place("payload's middle", offset + record.stored_bytes // 2, number)
            yield Place("payload's end", end - (TAG_BYTES if record.sealed else 0) - 1, number)
            if record.sealed:
                yield Place("seal", end - 1, number)
            if end % PAGE_BYTES:
                yield Place("payload's padding", end, number, harmless=True)


async def served(path: Path, *, encrypt: bool) -> dict[int, int]:
    """Blocks of each chain that are served after a restart, each compared with what was pushed."""
    async with opened(path, ssd_encrypt=encrypt) as one:
        return await check_all(one, _CHAINS, _CHAIN_BLOCKS)


@pytest.mark.parametrize("encrypt", [True, False], ids=["sealed", "plain"])
async def test_a_flipped_bit_anywhere(tmp_path: Path, encrypt: bool) -> None:
    original, damaged = tmp_path / "original", tmp_path / "damaged"
    segment = await store(original, encrypt=encrypt)
    assert len(read_frames(segment)) == _CHAINS
    for place in places(segment):
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(original, damaged)
        flip(damaged / segment.name, place.offset)
        found = await served(damaged, encrypt=encrypt)
        whole = [number for number, count in found.items() if count == _CHAIN_BLOCKS]
        assert whole[: place.chain] == list(range(place.chain)), place
        assert (len(whole) == _CHAINS) == place.harmless, place


@pytest.mark.parametrize("encrypt", [True, False], ids=["sealed", "plain"])
async def test_a_file_cut_off_anywhere(tmp_path: Path, encrypt: bool) -> None:
    """Just before, at and after every border; a restart writes on behind what is whole."""
    original, damaged = tmp_path / "original", tmp_path / "damaged"
    segment = await store(original, encrypt=encrypt)
    frames = read_frames(segment)
    borders = {0, PAGE_BYTES} | {frame.end for _, frame in frames}
    borders |= {offset for _, frame in frames for offset in frame.offsets}
    cuts = sorted({border + step for border in borders for step in (-1, 0, 1, PAGE_BYTES // 2) if border + step >= 0})
    for cut in cuts:
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(original, damaged)
        os.truncate(damaged / segment.name, cut)
        found = await served(damaged, encrypt=encrypt)
        for number, (_, frame) in enumerate(frames):
            stored_end = frame.offsets[-1] + frame.records[-1].stored_bytes
            assert (found[number] == _CHAIN_BLOCKS) == (cut >= stored_end), (cut, number)
        async with opened(damaged, ssd_encrypt=encrypt) as one:
            await push(one.store, chain(_CHAIN_BLOCKS, 9))
            await flushed(one)
        async with opened(damaged, ssd_encrypt=encrypt) as one:
            assert await pull(one.store, chain(_CHAIN_BLOCKS, 9)) == ["ssd"] * _CHAIN_BLOCKS


async def test_a_damaged_key_costs_its_owner_the_blocks(tmp_path: Path) -> None:
    original, damaged = tmp_path / "original", tmp_path / "damaged"
    await store(original)
    # owner, id of the key, nonce, wrapped key, its seal
    for offset in (0, 16, 24, 36, 83):
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(original, damaged)
        flip(damaged / "keys", offset)
        assert set((await served(damaged, encrypt=True)).values()) == {0}
    for size in (0, 1, 40, PAGE_BYTES):
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(original, damaged)
        os.truncate(damaged / "keys", size)
        found = set((await served(damaged, encrypt=True)).values())
        assert found == ({_CHAIN_BLOCKS} if size == PAGE_BYTES else {0})
