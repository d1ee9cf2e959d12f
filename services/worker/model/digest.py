"""The identity of a model as executed: equal digests mean interchangeable KV blocks.

Covers the bytes of the weight files, what they are rounded to, the compute dtype, the configuration, the rotary
frequencies and the served context length. Not covered is the instruction set: blocks made on another one differ in
rounding only. Parts are tagged and length-prefixed, so no two different lists of parts hash the same text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import MISSING, fields, is_dataclass

from services.worker.model.config import ModelConfig
from services.worker.model.layout import ComputeDtype
from services.worker.model.rope import inverse_frequencies

DIGEST_BYTES = 16
# What is computed from the same weights; raised when a change to the forward pass changes keys or values by design.
EXECUTION_VERSION = 1


def model_digest(
    config: ModelConfig, *, weights: bytes, dtype: ComputeDtype, served_context: int, weight_dtype: str = "dtype"
) -> bytes:
    """16 bytes. `weights`: of reading.LoadedWeights. weight_dtype: what they are rounded to for execution."""
    ropes = [config.rope, *([config.rope_local] if config.rope_local else [])]
    frequencies = [inverse_frequencies(rope, served_context).tolist() for rope in ropes]
    parts = (
        ("execution", str(EXECUTION_VERSION).encode()),
        ("weights", weights),
        ("dtype", dtype.encode()),
        ("config", repr(_set_fields(config)).encode()),
        ("rotary", repr(frequencies).encode()),
        ("context", str(served_context).encode()),
        *([] if weight_dtype == "dtype" else [("rounded weights", weight_dtype.encode())]),
    )
    return _digest_parts(parts)


def _set_fields(value: object) -> object:
    """The fields of a dataclass that are not at their defaults, by name: a new feature leaves other models' digests."""
    if not is_dataclass(value):
        return value
    items = ((field, getattr(value, field.name)) for field in fields(value))
    return sorted(
        (field.name, _set_fields(item)) for field, item in items if field.default is MISSING or item != field.default
    )


def _digest_parts(parts: Iterable[tuple[str, bytes]]) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for tag, part in parts:
        for piece in (tag.encode(), part):
            digest.update(len(piece).to_bytes(8, "little") + piece)
    return digest.digest()
