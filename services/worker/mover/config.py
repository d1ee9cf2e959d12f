"""What the front tells the mover at its start, and what comes from the environment."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from pydantic import Field

from services.common.blocks import LAYOUT_VERSION
from services.common.settings import ConfigurationError, ServiceSettings
from services.common.transfer.endpoint import TransportMode
from services.common.transfer.header import DTYPE_BYTES, BlockFormat, Segment
from services.common.transfer.heads import HeadRange
from services.worker.model.layout import QUANTISED


class MoverSettings(ServiceSettings):
    """The mesh secret, the log level, and settings for whoever operates the worker."""

    service: ClassVar[str] = "mover"

    transport: TransportMode = Field("auto", description="auto: shared memory on one host, else UCX, else gRPC.")
    max_lease_s: float = Field(10.0, gt=0, description="Longest time that a remote pull may hold blocks.")
    push_timeout_s: float = Field(5.0, gt=0, description="Deadline of a push.")


class MoverConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON of `--config`. Descriptors are inherited.

    Blocks are described whole: block_bytes, num_kv_heads, and block_shape as [kv_head, layer, k|v, token, head_dim],
    empty when the front does not say. The pool of a tensor-parallel rank has the heads first_head ..
    first_head + num_heads of each; num_heads 0: all.
    """

    engine_fd: int
    front_fd: int
    pool_fd: int
    num_blocks: int
    block_bytes: int
    num_kv_heads: int
    listen_host: str
    worker_id: str
    epoch: int
    model_digest_hex: str
    parent_pid: int
    layout_version: int = LAYOUT_VERSION
    kv_dtype: str = "bfloat16"
    block_shape: list[int] = []
    first_head: int = 0
    num_heads: int = 0
    advertise_host: str = ""
    transport: TransportMode | None = None

    def heads(self) -> HeadRange:
        """Heads that this rank owns. Raises ConfigurationError when the block does not have them."""
        try:
            heads = HeadRange(self.first_head, self.num_heads or self.num_kv_heads)
        except ValueError as error:
            raise ConfigurationError(f"mover: {error}") from None
        if heads.end > self.num_kv_heads:
            raise ConfigurationError(
                f"mover: first_head={self.first_head}, num_heads={self.num_heads}: not in {self.num_kv_heads}"
            )
        return heads

    def block_format(self) -> BlockFormat:
        """Format of this replica's whole blocks. Raises ConfigurationError when sizes disagree."""
        if self.kv_dtype not in DTYPE_BYTES:
            raise ConfigurationError(f"mover: kv_dtype={self.kv_dtype!r}: unknown")
        elements = self.block_bytes // DTYPE_BYTES[self.kv_dtype]
        shape = tuple(self.block_shape) or (self.num_kv_heads, elements // max(1, self.num_kv_heads))
        num_layers = shape[1] if len(shape) > 2 else 0
        segments = [Segment(0, num_layers, shape, self.kv_dtype)]
        if self.kv_dtype in QUANTISED and len(shape) > 2:
            # Each head's scales follow its elements (worker/model/layout.py).
            segments.append(Segment(0, num_layers, shape[:-1], "float32"))
        if sum(one.num_bytes for one in segments) != self.block_bytes or shape[0] != self.num_kv_heads:
            raise ConfigurationError(f"mover: block_bytes={self.block_bytes}: not {shape} of {self.kv_dtype}")
        return BlockFormat(
            bytes.fromhex(self.model_digest_hex),
            self.kv_dtype,
            self.num_kv_heads,
            self.block_bytes,
            tuple(segments),
            self.layout_version,
        )


def parse_config(text: str) -> MoverConfig:
    """Raises ConfigurationError."""
    try:
        return msgspec.json.decode(text, type=MoverConfig)
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"mover: --config: {error}") from None
