"""From the records that a restart found to an index. Pure.

Of a block written twice the later record counts. A record counts when its block header is whole, its owner's key is
the one it was written under, it is not too old, and its parent counts too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.common.blocks import BlockId
from services.common.transfer.errors import BlockInvalid
from services.common.transfer.header import decode_header
from services.kvstore.ssd_index import SsdEntry, SsdIndex
from services.kvstore.ssd_keys import OwnerKey
from services.kvstore.ssd_log import Place


class Keys(Protocol):
    """The part of the keys that recovery uses."""

    def find(self, owner: bytes, key_id: bytes) -> OwnerKey | None: ...


def recover(places: Sequence[Place], keys: Keys, *, oldest_s: int) -> tuple[SsdIndex, list[BlockId], int]:
    """The index, its ids with parents first, and how many records do not count."""
    found: dict[BlockId, SsdEntry] = {}
    for place in places:
        entry = _entry(place, keys, oldest_s)
        if entry is not None:
            found[entry.block_id] = entry
    children: dict[BlockId | None, list[SsdEntry]] = {}
    for entry in found.values():
        children.setdefault(entry.parent_id, []).append(entry)
    index = SsdIndex()
    ids: list[BlockId] = []
    waiting = children.get(None, [])
    for entry in waiting:
        if index.insert(entry):
            ids.append(entry.block_id)
            waiting.extend(children.get(entry.block_id, ()))
    return index, ids, len(places) - len(ids)


def _entry(place: Place, keys: Keys, oldest_s: int) -> SsdEntry | None:
    if place.record.created_s < oldest_s:
        return None
    try:
        header = decode_header(place.record.header)
        payload_bytes = header.payload_bytes
    except BlockInvalid:
        return None
    if keys.find(header.owner_digest, place.record.key_id) is None:
        return None
    parent_id = None if header.starts_chain else header.parent_id
    return SsdEntry(header.block_id, parent_id, header.owner_digest, payload_bytes, place)
