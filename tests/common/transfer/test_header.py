"""A header and its payload are refused when anything about them is not what it must be."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

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
    verify_payload,
)
from services.common.transfer.heads import MAX_HEADS, HeadRange

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


# The header above, as it was encoded before headers of parts existed.
_EARLIER = bytes.fromhex("""
    4b564d4201009e000100000102030405060708090a0b0c0d0e0f707070707070707070707070707070706f6f6f6f6f6f
    6f6f6f6f6f6f6f6f6f6f01000000106d6f64656c20646967657374203136620862666c6f617431360100030000000400
    0503000000040000000200000010000000080000000862666c6f6174313643f7d88b23e893323baa9f0beb231027e072
    c7b2d7ea9fef1f11a20d1a893076
    """)


def test_headers_of_earlier_versions_decode() -> None:
    assert _EARLIER == _HEADER
    assert decode_header(_EARLIER).part is None


@given(st.integers(0, 2), st.integers(1, 3), st.integers(0, 2), st.integers(1, 3))
def test_any_heads_can_be_checked_by_any_header_that_covers_them(
    first: int, count: int, wanted_first: int, wanted_count: int
) -> None:
    if max(first + count, wanted_first + wanted_count) > 3:
        return
    made, wanted = HeadRange(first, count), HeadRange(wanted_first, wanted_count)
    data = memoryview(_PAYLOAD)
    encoded = make_header(_FORMAT, _ID, made.share(data, 3), parent_id=BlockId(b"p" * 16), heads=made)
    share = wanted.share(data, 3)
    if not made.contains(wanted):
        with pytest.raises(BlockInvalid, match="heads"):
            verify_block(encoded, share, _ID, _FORMAT, wanted)
        return
    header = verify_block(encoded, share, _ID, _FORMAT, wanted)
    assert (header.num_kv_heads, header.covered, header.encode()) == (3, made, encoded)
    assert (header.part is None) == (count == 3)
    for wrong in (share[:-1], data[: len(data) - len(share)], bytes(len(share))):
        with pytest.raises(BlockInvalid, match=r"size|checksum"):
            verify_block(encoded, memoryview(wrong), _ID, _FORMAT, wanted)


def test_a_part_is_no_whole_block() -> None:
    part = HeadRange(0, 2)
    encoded = make_header(_FORMAT, _ID, part.share(memoryview(_PAYLOAD), 3), heads=part)
    with pytest.raises(BlockInvalid, match="heads"):
        verify_block(encoded, memoryview(_PAYLOAD), _ID, _FORMAT)
    with pytest.raises(BlockInvalid, match="size"):
        verify_payload(decode_header(encoded), memoryview(_PAYLOAD))
    whole = decode_header(encoded).completed(decode_header(_HEADER).checksums)
    assert decode_header(whole.encode()).part is None
    verify_block(whole.encode(), memoryview(_PAYLOAD), _ID, _FORMAT)


@given(st.integers(0, 8 * 200))
def test_a_flipped_bit_in_the_header_of_a_part_is_refused(bit: int) -> None:
    part = HeadRange(1, 1)
    share = part.share(memoryview(_PAYLOAD), 3)
    encoded = make_header(_FORMAT, _ID, share, heads=part)
    with pytest.raises(BlockInvalid):
        verify_block(_flip(encoded, bit % (8 * len(encoded))), share, _ID, _FORMAT, part)


@pytest.mark.parametrize(("first", "count", "of"), [(0, 3, 3), (2, 2, 3), (0, 4, 3), (0, 1, 0), (65535, 1, 3)])
def test_a_part_that_cannot_be_is_refused(first: int, count: int, of: int) -> None:
    """Its digest is right: nothing but the fields is wrong."""
    template = decode_header(_HEADER)
    odd = replace(template, part=HeadRange(0, count), part_of=of, checksums=(1,) * count).encode()
    place = len(odd) - 8 - 8 * count - 4
    body = odd[:place] + struct.pack("<HH", first, of) + odd[place + 4 : -8]
    with pytest.raises(BlockInvalid, match="heads"):
        decode_header(body + struct.pack("<Q", xxh3_64_intdigest(body)))


def test_a_range_of_heads_is_not_empty_and_in_the_block() -> None:
    for first, count in ((-1, 1), (0, 0), (5, -2), (MAX_HEADS, 1)):
        with pytest.raises(ValueError, match="KV heads"):
            HeadRange(first, count)
    assert HeadRange(1, 2).share(memoryview(b"aabbcc"), 3) == b"bbcc"
    for heads, num_heads in ((HeadRange(1, 3), 3), (HeadRange(0, 1), 4)):
        with pytest.raises(BlockInvalid, match="heads"):
            heads.share(memoryview(b"aabbcc"), num_heads)


def _flip(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
