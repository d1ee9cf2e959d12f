"""The block format that a mover makes of what the front tells it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.common.blocks import BlockId
from services.common.settings import ConfigurationError
from services.common.transfer.errors import BlockInvalid
from services.common.transfer.header import make_header, verify_block
from services.worker.model.layout import KvDtype, KvLayout
from services.worker.mover.config import MoverConfig


def config(layout: KvLayout, block_bytes: int = 0) -> MoverConfig:
    return MoverConfig(
        engine_fd=0,
        front_fd=0,
        pool_fd=0,
        num_blocks=1,
        block_bytes=block_bytes or layout.block_bytes,
        num_kv_heads=layout.num_kv_heads,
        listen_host="",
        worker_id="w",
        epoch=1,
        model_digest_hex="00" * 16,
        parent_pid=0,
        kv_dtype=layout.dtype,
        block_shape=list(layout.block_shape),
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int8"])
def test_a_block_of_any_dtype_is_sent_and_verified_with_its_scales(dtype: KvDtype) -> None:
    layout = KvLayout(num_kv_heads=2, num_layers=3, head_dim=16, dtype=dtype)
    block_format = config(layout).block_format()
    assert len(block_format.segments) == (2 if layout.is_quantised else 1)
    payload = bytearray(range(256)) * (layout.block_bytes // 256) + bytearray(layout.block_bytes % 256)
    name = BlockId(b"i" * 16)
    header = make_header(block_format, name, memoryview(payload))
    verify_block(header, memoryview(payload), name, block_format)
    # The last byte is of a scale, where there are any.
    payload[-1] ^= 1
    with pytest.raises(BlockInvalid, match="checksum"):
        verify_block(header, memoryview(payload), name, block_format)
    with pytest.raises(BlockInvalid, match="dtype"):
        verify_block(header, memoryview(payload), name, replace(block_format, kv_dtype="float32"))


def test_a_size_without_its_scales_is_refused() -> None:
    layout = KvLayout(num_kv_heads=2, num_layers=3, head_dim=16, dtype="int8")
    with pytest.raises(ConfigurationError, match="block_bytes"):
        config(layout, 2 * 3 * 2 * 16 * 16).block_format()
