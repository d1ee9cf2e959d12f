"""A header and its payload are refused when anything about them is not what it must be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.blocks import BlockId
from services.common.transfer.errors import BlockInvalid
from services.common.transfer.header import (
    BlockFormat,
    BlockHeader,
    Segment,
    decode_header,
    head_checksums,
    make_header,
    verify_block,
)

_ID = BlockId(bytes(range(16)))
_FORMAT = BlockFormat(
    b"model digest 16b", "bfloat16", 3, 3 * 4 * 2 * 16 * 8 * 2, (Segment(0, 4, (3, 4, 2, 16, 8), "bfloat16"),)
)
_PAYLOAD = bytes((i * 7 + i // 256) % 256 for i in range(_FORMAT.block_bytes))
_HEADER = make_header(
    _FORMAT, _ID, memoryview(_PAYLOAD), parent_id=BlockId(b"p" * 16), owner_digest=b"o" * 16, starts_chain=True
)


def test_round_trip() -> None:
    header = verify_block(_HEADER, memoryview(_PAYLOAD), _ID, _FORMAT)
    assert header.parent_id == b"p" * 16
    assert header.owner_digest == b"o" * 16
    assert header.starts_chain
    assert header.segments == _FORMAT.segments
    assert header.encode() == _HEADER
    # The heads' parts are contiguous: a rank's share can be checked alone.
    share = len(_PAYLOAD) // 3
    assert header.checksums[1:2] == head_checksums(memoryview(_PAYLOAD)[share : 2 * share], 1)


@given(st.integers(0, len(_HEADER) * 8 - 1))
def test_a_flipped_bit_in_the_header_is_refused(bit: int) -> None:
    with pytest.raises(BlockInvalid):
        verify_block(_flip(_HEADER, bit), memoryview(_PAYLOAD), _ID, _FORMAT)


@given(st.integers(0, len(_PAYLOAD) * 8 - 1))
def test_a_flipped_bit_in_the_payload_is_refused(bit: int) -> None:
    with pytest.raises(BlockInvalid, match="checksum"):
        verify_block(_HEADER, memoryview(_flip(_PAYLOAD, bit)), _ID, _FORMAT)


@given(st.binary(max_size=400))
def test_noise_is_no_header(data: bytes) -> None:
    with pytest.raises(BlockInvalid):
        decode_header(data)


@given(st.integers(0, len(_HEADER) - 1))
def test_a_cut_header_is_refused(length: int) -> None:
    with pytest.raises(BlockInvalid):
        decode_header(_HEADER[:length])


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("model", replace(_FORMAT, model_digest=b"another")),
        ("layout", replace(_FORMAT, layout_version=2)),
        ("dtype", replace(_FORMAT, kv_dtype="float16")),
        ("dtype", replace(_FORMAT, segments=(Segment(0, 4, (3, 4, 2, 8, 16), "bfloat16"),))),
        ("size", replace(_FORMAT, num_kv_heads=1)),
    ],
)
def test_another_format_is_refused(reason: str, expected: BlockFormat) -> None:
    with pytest.raises(BlockInvalid, match=reason):
        verify_block(_HEADER, memoryview(_PAYLOAD), _ID, expected)


def test_another_id_and_another_size_are_refused() -> None:
    with pytest.raises(BlockInvalid, match="id"):
        verify_block(_HEADER, memoryview(_PAYLOAD), BlockId(bytes(16)), _FORMAT)
    with pytest.raises(BlockInvalid, match="size"):
        verify_block(_HEADER, memoryview(_PAYLOAD[:-2]), _ID, _FORMAT)


def test_an_unknown_dtype_is_refused_even_with_good_checksums() -> None:
    odd = BlockHeader(_ID, _ID, b"m", b"o" * 16, 1, "float3", (Segment(0, 1, (4,), "float3"),), (1,))
    with pytest.raises(BlockInvalid, match="dtype"):
        _ = decode_header(odd.encode()).payload_bytes


def _flip(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
