"""Which blocks are on the SSD and where. Pure: no clock, no files.

The set is prefix-closed by itself: a block is entered only under a parent that is here, and whoever takes a block
takes its descendants. So nothing in RAM ever hangs on the SSD, and a restart finds whole prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from services.common.blocks import TENANT_TAG_BYTES, BlockId
from services.kvstore.ssd_format import padded
from services.kvstore.ssd_log import Place


@dataclass(slots=True)
class SsdEntry:
    """A block on the SSD. hot: wanted since it was written where it lies."""

    block_id: BlockId
    parent_id: BlockId | None
    owner: bytes
    payload_bytes: int
    place: Place
    hot: bool = False

    @property
    def tenant(self) -> bytes:
        """Whose quota it counts against."""
        return self.owner[:TENANT_TAG_BYTES]


class SsdIndex:
    """Entries, and the sums that follow from them."""

    def __init__(self) -> None:
        self._entries: dict[BlockId, SsdEntry] = {}
        self._children: dict[BlockId, dict[BlockId, None]] = {}
        self._segments: dict[int, dict[BlockId, None]] = {}
        # Blocks without children here, by tenant, the oldest first.
        self._leaves: dict[bytes, dict[BlockId, None]] = {}
        self._tenant_bytes: dict[bytes, int] = {}
        self._num_bytes = 0

    def __contains__(self, block_id: BlockId) -> bool:
        return block_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Payload of all entries."""
        return self._num_bytes

    def get(self, block_id: BlockId) -> SsdEntry | None:
        """The entry of a block."""
        return self._entries.get(block_id)

    def owner_bytes(self, owner: bytes) -> int:
        """Payload of the entries of an owner's tenant."""
        return self._tenant_bytes.get(owner[:TENANT_TAG_BYTES], 0)

    def owned(self, owner: bytes) -> list[BlockId]:
        """Every block of an owner."""
        return [entry.block_id for entry in self._entries.values() if entry.owner == owner]

    def of_dead(self, is_dead: Callable[[bytes], bool]) -> list[SsdEntry]:
        """The entries of dead owners."""
        return [entry for entry in self._entries.values() if is_dead(entry.owner)]

    def in_segment(self, segment: int) -> list[SsdEntry]:
        """Entries whose bytes lie in a segment."""
        return [self._entries[block_id] for block_id in self._segments.get(segment, ())]

    def run(self, ids: Sequence[BlockId], max_bytes: int) -> list[SsdEntry]:
        """The leading blocks of `ids` that are here, the first always and further ones up to `max_bytes`."""
        found: list[SsdEntry] = []
        num_bytes = 0
        for block_id in ids:
            entry = self._entries.get(block_id)
            if entry is None or (found and num_bytes + entry.payload_bytes > max_bytes):
                break
            num_bytes += entry.payload_bytes
            found.append(entry)
        return found

    def insert(self, entry: SsdEntry) -> bool:
        """False when the block is here already or its parent is not."""
        parent_id = entry.parent_id
        if entry.block_id in self._entries or (parent_id is not None and parent_id not in self._entries):
            return False
        self._entries[entry.block_id] = entry
        self._segments.setdefault(entry.place.segment, {})[entry.block_id] = None
        self._leaves.setdefault(entry.tenant, {})[entry.block_id] = None
        self._count(entry, entry.payload_bytes)
        if parent_id is not None:
            parent = self._entries[parent_id]
            self._children.setdefault(parent_id, {})[entry.block_id] = None
            self._leaves[parent.tenant].pop(parent_id, None)
        return True

    def move(self, block_id: BlockId, old: Place, new: Place) -> None:
        """The bytes lie at `new` now, if the block is still here and was at `old`."""
        entry = self._entries.get(block_id)
        if entry is not None and entry.place is old:
            self._leave_segment(entry)
            entry.place, entry.hot = new, False
            self._segments.setdefault(new.segment, {})[block_id] = None

    def remove(self, ids: Iterable[BlockId]) -> list[BlockId]:
        """Take blocks and their descendants. Returns all that went, descendants before their ancestors."""
        gone: list[BlockId] = []
        for block_id in ids:
            for descendant in reversed(self._subtree(block_id)):
                self._drop(descendant)
                gone.append(descendant)
        return gone

    def keepers(self, segment: int, max_bytes: int) -> list[SsdEntry]:
        """What is worth copying out of a segment, parents first: hot blocks and what others elsewhere hang on.

        Ancestors in the segment come along; what exceeds max_bytes does not.
        """
        inside = self._segments.get(segment, {})
        entries = [self._entries[block_id] for block_id in inside]
        wanted = [entry for entry in entries if entry.hot]
        wanted += [entry for entry in entries if not entry.hot and self._has_child_outside(entry, inside)]
        kept: dict[BlockId, SsdEntry] = {}
        num_bytes = 0
        for entry in wanted:
            path = self._path_inside(entry, inside, kept)
            size = sum(padded(step.place.record.stored_bytes) for step in path)
            if num_bytes + size <= max_bytes:
                num_bytes += size
                kept.update((step.block_id, step) for step in path)
        return list(kept.values())

    def quota_victim(self, owner: bytes, spared: Collection[BlockId]) -> BlockId | None:
        """The oldest block of the owner's tenant that nothing hangs on."""
        leaves = self._leaves.get(owner[:TENANT_TAG_BYTES], ())
        return next((block_id for block_id in leaves if block_id not in spared), None)

    def clear(self) -> list[BlockId]:
        """Take everything."""
        return self.remove([entry.block_id for entry in self._entries.values() if entry.parent_id is None])

    def check(self) -> None:
        """Raises AssertionError when the parts disagree; for tests."""
        children: dict[BlockId, set[BlockId]] = {}
        for entry in self._entries.values():
            if entry.parent_id is not None:
                assert entry.parent_id in self._entries
                children.setdefault(entry.parent_id, set()).add(entry.block_id)
            assert entry.block_id in self._segments[entry.place.segment]
        assert {block_id: set(ids) for block_id, ids in self._children.items()} == children
        assert sum(len(ids) for ids in self._segments.values()) == len(self._entries)
        leaves = {block_id for ids in self._leaves.values() for block_id in ids}
        assert leaves == set(self._entries) - set(children)
        assert self._num_bytes == sum(entry.payload_bytes for entry in self._entries.values())
        assert sum(self._tenant_bytes.values()) == self._num_bytes

    def _subtree(self, block_id: BlockId) -> list[BlockId]:
        """Parents before children."""
        found = [block_id] if block_id in self._entries else []
        for one in found:
            found.extend(self._children.get(one, ()))
        return found

    def _path_inside(
        self, entry: SsdEntry, inside: dict[BlockId, None], kept: dict[BlockId, SsdEntry]
    ) -> list[SsdEntry]:
        path = []
        step: SsdEntry | None = entry
        while step is not None and step.block_id in inside and step.block_id not in kept:
            path.append(step)
            step = self._entries.get(step.parent_id) if step.parent_id is not None else None
        return path[::-1]

    def _has_child_outside(self, entry: SsdEntry, inside: dict[BlockId, None]) -> bool:
        return any(child not in inside for child in self._children.get(entry.block_id, ()))

    def _drop(self, block_id: BlockId) -> None:
        entry = self._entries.pop(block_id)
        self._leave_segment(entry)
        self._leaves[entry.tenant].pop(block_id, None)
        if not self._leaves[entry.tenant] and self._tenant_bytes[entry.tenant] == entry.payload_bytes:
            del self._leaves[entry.tenant]
        self._count(entry, -entry.payload_bytes)
        if entry.parent_id is None:
            return
        siblings = self._children[entry.parent_id]
        del siblings[block_id]
        if not siblings:
            del self._children[entry.parent_id]
            parent = self._entries[entry.parent_id]
            self._leaves.setdefault(parent.tenant, {})[entry.parent_id] = None

    def _leave_segment(self, entry: SsdEntry) -> None:
        ids = self._segments[entry.place.segment]
        del ids[entry.block_id]
        if not ids:
            del self._segments[entry.place.segment]

    def _count(self, entry: SsdEntry, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        left = self._tenant_bytes.get(entry.tenant, 0) + num_bytes
        if left:
            self._tenant_bytes[entry.tenant] = left
        else:
            self._tenant_bytes.pop(entry.tenant, None)
