"""Identity of KV blocks: the one place that turns tokens into block ids.

A block id is a keyed BLAKE2b-128 digest (RFC 7693) over the id of the parent block and the block's own tokens; the
first parent is a root that binds everything a block's bytes depend on. Every hashed part is tagged and
length-prefixed, so that no value can be read as another. Ids are capabilities: they go into no header, log or trace.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NewType

import numpy as np
import numpy.typing as npt

BlockId = NewType("BlockId", bytes)

BLOCK_ID_BYTES = 16
BLOCK_TOKENS = 16
FORMAT_VERSION = 1
LAYOUT_VERSION = 1
TENANT_TAG_BYTES = 8

_PART = struct.Struct("<BI")
_GENERATION = struct.Struct("<Q")
# Taking ids apart so many at a time takes a quarter of the time.
_MANY_IDS = struct.Struct("16s" * 64)
_TAG_ROOT, _TAG_BLOCK, _TAG_PARENT, _TAG_TOKENS = 1, 2, 3, 4
_TAG_FORMAT, _TAG_MODEL, _TAG_KV_DTYPE, _TAG_LAYOUT, _TAG_ADAPTER, _TAG_NAMESPACE = 16, 17, 18, 19, 20, 21
_TAG_TENANT, _TAG_GENERATION, _TAG_SHARED, _TAG_SALT, _TAG_CLEARED = 32, 33, 34, 35, 36


def tagged(parts: Iterable[tuple[int, bytes]]) -> bytes:
    """Each part as tag (u8), length (u32 little-endian) and bytes, one after another."""
    return b"".join(_PART.pack(tag, len(value)) + value for tag, value in parts)


def cache_namespace(
    *, tenant: str, generation: int, cleared: int = 0, shared: str | None = None, cache_salt: str = ""
) -> bytes:
    """Namespace of a request's blocks: its tenant and generations, or a shared namespace, and the optional salt.

    generation: as configured; cleared: of the tenant's latest clearing. Raising either puts older blocks out of reach.
    """
    if shared is not None:
        owner = [(_TAG_SHARED, shared.encode())]
    else:
        owner = [(_TAG_TENANT, tenant.encode()), (_TAG_GENERATION, _GENERATION.pack(generation))]
        owner += [(_TAG_CLEARED, _GENERATION.pack(cleared))] if cleared else []
    return tagged([*owner, (_TAG_SALT, cache_salt.encode())])


def tenant_tag(key: bytes, tenant: str) -> bytes:
    """8 bytes that stand for a tenant where its name must not appear."""
    return blake2b(tagged([(_TAG_TENANT, tenant.encode())]), digest_size=BLOCK_ID_BYTES, key=key).digest()[
        :TENANT_TAG_BYTES
    ]


def owner_digest(key: bytes, *, tenant: str, cleared: int = 0) -> bytes:
    """16 bytes that name a block's owner in its header: the tenant's tag and the clearing that it came after."""
    return owner_of(tenant_tag(key, tenant), cleared)


def owner_of(tag: bytes, cleared: int) -> bytes:
    """The owner digest of a tenant's tag and clearing."""
    return tag + _GENERATION.pack(cleared)


def split_owner(owner: bytes) -> tuple[bytes, int]:
    """Inverse of `owner_of`."""
    return owner[:TENANT_TAG_BYTES], _GENERATION.unpack_from(owner, TENANT_TAG_BYTES)[0]


def block_root(
    key: bytes,
    *,
    model_digest: bytes,
    kv_dtype: str,
    namespace: bytes,
    adapter_digest: bytes | None = None,
    layout_version: int = LAYOUT_VERSION,
) -> BlockId:
    """Parent of every first block of one model, KV dtype, layout, adapter and cache namespace.

    key: secret of the mesh, 16 to 64 bytes. adapter_digest: None for the base model, which differs from b"".
    """
    parts = [
        (_TAG_ROOT, b""),
        (_TAG_FORMAT, struct.pack("<I", FORMAT_VERSION)),
        (_TAG_MODEL, model_digest),
        (_TAG_KV_DTYPE, kv_dtype.encode()),
        (_TAG_LAYOUT, struct.pack("<I", layout_version)),
        (_TAG_NAMESPACE, namespace),
    ]
    if adapter_digest is not None:
        parts.append((_TAG_ADAPTER, adapter_digest))
    return BlockId(blake2b(tagged(parts), digest_size=BLOCK_ID_BYTES, key=key).digest())


def next_block_id(key: bytes, parent: BlockId, tokens: Sequence[int] | npt.NDArray[np.uint32]) -> BlockId:
    """Id of the full block of `tokens` (little-endian u32) after `parent`."""
    raw = np.asarray(tokens, dtype="<u4").tobytes()
    head = _PART.pack(_TAG_BLOCK, 0) + _PART.pack(_TAG_PARENT, len(parent)) + parent + _PART.pack(_TAG_TOKENS, len(raw))
    return BlockId(blake2b(head + raw, digest_size=BLOCK_ID_BYTES, key=key).digest())


def chain_block_ids(
    key: bytes,
    parent: BlockId,
    tokens: Sequence[int] | npt.NDArray[np.uint32],
    block_tokens: int = BLOCK_TOKENS,
) -> list[BlockId]:
    """Ids of all full blocks of `tokens` in order; a last partial block has none."""
    array = np.asarray(tokens, dtype="<u4")
    ids: list[BlockId] = []
    for start in range(0, len(array) - block_tokens + 1, block_tokens):
        parent = next_block_id(key, parent, array[start : start + block_tokens])
        ids.append(parent)
    return ids


def join_ids(ids: Iterable[BlockId]) -> bytes:
    """Ids concatenated, as messages carry them."""
    return b"".join(ids)


def split_ids(joined: bytes) -> list[BlockId]:
    """Inverse of `join_ids`. Raises ValueError when the length is no multiple of an id's."""
    if len(joined) % BLOCK_ID_BYTES:
        raise ValueError(f"{len(joined)} bytes are no whole number of {BLOCK_ID_BYTES}-byte block ids")
    ids: list[BlockId] = []
    whole = len(joined) - len(joined) % _MANY_IDS.size
    for at in range(0, whole, _MANY_IDS.size):
        ids.extend(_MANY_IDS.unpack_from(joined, at))
    ids.extend(BlockId(joined[at : at + BLOCK_ID_BYTES]) for at in range(whole, len(joined), BLOCK_ID_BYTES))
    return ids
