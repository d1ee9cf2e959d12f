"""Which blocks are in RAM and which go first. Pure: no clock, no transport; memory comes from the arena.

The set is prefix-closed: a block is kept only under a parent that is here (or as the first of its chain), and only
blocks without children here, and not lent out, can go. Among those the order is S3-FIFO's (Yang et al., SOSP 2023):
newcomers enter a small queue, blocks used again move to the main one, and a block that returns soon after it left
goes to the main one directly, so a scan of blocks used once passes through without pushing out the others. A block
that gets its last child taken away joins at the end that goes first: it is older than that child was.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from services.common.blocks import TENANT_TAG_BYTES, BlockId
from services.common.transfer.header import NO_OWNER
from services.common.transfer.shm_directory import BlockDirectory
from services.kvstore.arena import Arena, Slot

SMALL_FRACTION = 0.1
MAX_USES = 3


@dataclass(slots=True)
class Entry:
    """A block in RAM. `uses` counts hits since it last escaped eviction, up to MAX_USES.

    pins: readers that leave its place in the queue as it is. gone: cleared while it was lent or pinned; its slot is
    freed with the last of these.
    """

    block_id: BlockId
    parent_id: BlockId | None
    slot: Slot
    header: bytes
    owner: bytes = NO_OWNER
    created_s: int = 0
    children: int = 0
    leases: int = 0
    pins: int = 0
    uses: int = 0
    in_main: bool = False
    gone: bool = False


@dataclass(frozen=True, slots=True)
class RamStatistics:
    """Counts of one moment."""

    num_blocks: int
    num_bytes: int
    capacity_bytes: int
    leased_blocks: int
    evicted_blocks: int


class RamTier:
    """Owns the entries and their slots; only it frees a slot that holds a block."""

    def __init__(
        self,
        arena: Arena,
        *,
        small_fraction: float = SMALL_FRACTION,
        owner_bytes: int = 0,
        directory: BlockDirectory | None = None,
    ) -> None:
        """owner_bytes: most that one tenant may take, its reserved slots included; 0: no limit.

        directory: lists what is here, for readers that do not ask.
        """
        self._arena = arena
        self._directory = directory
        self._entries: dict[BlockId, Entry] = {}
        self._num_bytes = 0
        self._main_bytes = 0
        self._leased = 0
        self._evicted = 0
        self._small_fraction = small_fraction
        # Childless blocks that are not lent, the next to go first.
        self._small: OrderedDict[BlockId, None] = OrderedDict()
        self._main: OrderedDict[BlockId, None] = OrderedDict()
        self._ghosts: OrderedDict[BlockId, None] = OrderedDict()
        self._owner_limit = owner_bytes
        self._owner_bytes: dict[bytes, int] = {}
        # The queued blocks of each tenant, kept only where there is a limit.
        self._owner_queues: dict[bytes, dict[BlockId, None]] = {}

    def __contains__(self, block_id: BlockId) -> bool:
        return block_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def statistics(self) -> RamStatistics:
        """A snapshot."""
        return RamStatistics(
            len(self._entries), self._num_bytes, self._arena.capacity_bytes, self._leased, self._evicted
        )

    @property
    def is_nearly_full(self) -> bool:
        """Whether what comes next makes others go."""
        return self._num_bytes > 0.9 * self._arena.capacity_bytes

    def lease(self, ids: Sequence[BlockId]) -> list[Entry]:
        """The leading blocks of `ids` that are here. They stay until `release` of the same entries."""
        leased = []
        for block_id in ids:
            entry = self._entries.get(block_id)
            if entry is None:
                break
            entry.uses = min(MAX_USES, entry.uses + 1)
            self._hold(entry)
            leased.append(entry)
        return leased

    def hold(self, block_id: BlockId) -> Entry | None:
        """Lend one block without counting it as used; None when it is not here."""
        entry = self._entries.get(block_id)
        if entry is not None:
            self._hold(entry)
        return entry

    def touch(self, ids: Sequence[BlockId]) -> list[Entry]:
        """Count a use of those of `ids` that are here, and return them: they were read without being lent."""
        entries = [entry for block_id in ids if (entry := self._entries.get(block_id)) is not None]
        for entry in entries:
            entry.uses = min(MAX_USES, entry.uses + 1)
        return entries

    def release(self, entries: Sequence[Entry]) -> None:
        """End what `lease` or `hold` began."""
        for entry in entries:
            entry.leases -= 1
            if entry.leases == 0:
                self._leased -= 1
                if entry.gone:
                    self._free_gone(entry)
                else:
                    self._enqueue(entry)

    def pin(self, entry: Entry) -> None:
        """Keep a block that is here until `unpin`, without a change to the order in which blocks go."""
        entry.pins += 1

    def unpin(self, entry: Entry) -> None:
        """End what `pin` began."""
        entry.pins -= 1
        if entry.gone:
            self._free_gone(entry)

    def allocate(self, num_bytes: int, owner: bytes = NO_OWNER) -> tuple[Slot | None, list[Entry]]:
        """A slot, and the blocks that had to go for it, descendants first. The slot is the caller's until `insert`."""
        gone: list[Entry] = []
        while self._owner_limit and self.owner_bytes(owner) + num_bytes > self._owner_limit:
            own = self._first_unpinned(self._owner_queues.get(_tenant(owner), ()))
            if own is None:
                return None, gone
            self._evict(own)
            gone.append(own)
        while (slot := self._arena.allocate(num_bytes)) is None:
            if num_bytes > self._arena.slab_bytes or (victim := self._next_victim()) is None:
                break
            self._evict(victim)
            gone.append(victim)
        if slot is not None:
            self._charge(owner, num_bytes)
        return slot, gone

    def discard(self, slot: Slot, owner: bytes = NO_OWNER) -> None:
        """Give back a slot from `allocate` for this owner that was not inserted."""
        self._arena.free(slot)
        self._charge(owner, -slot.num_bytes)

    def insert(
        self,
        block_id: BlockId,
        parent_id: BlockId | None,
        slot: Slot,
        header: bytes,
        *,
        owner: bytes = NO_OWNER,
        created_s: int = 0,
    ) -> bool:
        """Keep a block whose bytes are in `slot`, allocated for its owner. parent_id None: first of its chain.

        False, and the slot stays the caller's, when the block is here already or its parent is not.
        """
        parent = self._entries.get(parent_id) if parent_id is not None else None
        if block_id in self._entries or (parent_id is not None and parent is None):
            return False
        entry = self._entries[block_id] = Entry(block_id, parent_id, slot, header, owner, created_s)
        self._num_bytes += slot.num_bytes
        if self._directory is not None:
            self._directory.add(block_id, slot.offset, slot.num_bytes, header)
        if parent is not None:
            parent.children += 1
            self._dequeue(parent)
        if self._ghosts.pop(block_id, 0) is None:
            self._promote(entry)
        self._enqueue(entry)
        return True

    def peek(self, block_id: BlockId) -> Entry | None:
        """The entry of a block, neither lent nor counted as used."""
        return self._entries.get(block_id)

    def path(self, block_id: BlockId) -> list[Entry]:
        """The block and all before it, the first of the chain first; empty when it is not here."""
        path: list[Entry] = []
        entry = self._entries.get(block_id)
        while entry is not None:
            path.append(entry)
            entry = self._entries.get(entry.parent_id) if entry.parent_id is not None else None
        path.reverse()
        return path

    def owner_bytes(self, owner: bytes) -> int:
        """What an owner's tenant takes, reserved slots included."""
        return self._owner_bytes.get(_tenant(owner), 0)

    def clear(self, is_dead: Callable[[bytes], bool]) -> list[Entry]:
        """Take the blocks of dead owners and all below them, lent or not. Returns them, descendants first."""
        doomed: dict[BlockId, None] = {}
        # Insertion order has parents before children.
        for entry in self._entries.values():
            if entry.parent_id in doomed or is_dead(entry.owner):
                doomed[entry.block_id] = None
        gone = [self._entries[block_id] for block_id in reversed(doomed)]
        for entry in gone:
            self._forget(entry)
            entry.gone = True
            self._free_gone(entry)
        return gone

    def view(self, entry: Entry) -> memoryview:
        """The block's bytes; stable while it is lent."""
        return self._arena.view(entry.slot)

    def memory(self, slot: Slot) -> memoryview:
        """The memory of a slot from `allocate`."""
        return self._arena.view(slot)

    def check(self) -> None:
        """Raises AssertionError when the sets disagree; for tests and idle moments."""
        queued = {*self._small, *self._main}
        assert len(queued) == len(self._small) + len(self._main)
        children = dict.fromkeys(self._entries, 0)
        for entry in self._entries.values():
            if entry.parent_id is not None:
                children[entry.parent_id] += 1
            assert (entry.block_id in queued) == (entry.children == 0 and entry.leases == 0)
        assert all(entry.children == children[block_id] for block_id, entry in self._entries.items())
        assert self._num_bytes == sum(entry.slot.num_bytes for entry in self._entries.values())
        assert self._main_bytes == sum(e.slot.num_bytes for e in self._entries.values() if e.in_main)
        assert self._leased >= sum(entry.leases > 0 for entry in self._entries.values())
        if self._owner_limit:
            assert {block_id for queue in self._owner_queues.values() for block_id in queue} == queued
            assert all(num_bytes <= self._owner_limit for num_bytes in self._owner_bytes.values())

    def _hold(self, entry: Entry) -> None:
        if entry.leases == 0:
            self._leased += 1
            self._dequeue(entry)
        entry.leases += 1

    def _enqueue(self, entry: Entry, *, goes_first: bool = False) -> None:
        if entry.children or entry.leases:
            return
        queue = self._main if entry.in_main else self._small
        queue[entry.block_id] = None
        if goes_first:
            queue.move_to_end(entry.block_id, last=False)
        if self._owner_limit:
            self._owner_queues.setdefault(_tenant(entry.owner), {})[entry.block_id] = None

    def _dequeue(self, entry: Entry) -> None:
        (self._main if entry.in_main else self._small).pop(entry.block_id, None)
        if (own := self._owner_queues.get(_tenant(entry.owner))) is not None:
            own.pop(entry.block_id, None)
            if not own:
                del self._owner_queues[_tenant(entry.owner)]

    def _charge(self, owner: bytes, num_bytes: int) -> None:
        left = self.owner_bytes(owner) + num_bytes
        if left:
            self._owner_bytes[_tenant(owner)] = left
        else:
            del self._owner_bytes[_tenant(owner)]

    def _promote(self, entry: Entry) -> None:
        entry.in_main = True
        self._main_bytes += entry.slot.num_bytes

    def _next_victim(self) -> Entry | None:
        """Every pass either ends, moves a block to the main queue or takes one use from it: it ends."""
        while True:
            small_bytes = self._num_bytes - self._main_bytes
            queues = [self._main, self._small]
            if not self._main or small_bytes > self._small_fraction * self._arena.capacity_bytes:
                queues.reverse()
            entry = self._first_unpinned(queues[0]) or self._first_unpinned(queues[1])
            if entry is None or entry.uses == 0:
                return entry
            self._dequeue(entry)
            if entry.in_main:
                entry.uses -= 1
            else:
                entry.uses = 0
                self._promote(entry)
            self._enqueue(entry)

    def _first_unpinned(self, queue: Iterable[BlockId]) -> Entry | None:
        return next((entry for block_id in queue if not (entry := self._entries[block_id]).pins), None)

    def _free_gone(self, entry: Entry) -> None:
        if not entry.leases and not entry.pins:
            self.discard(entry.slot, entry.owner)

    def _evict(self, entry: Entry) -> None:
        self._forget(entry)
        self._evicted += 1
        if not entry.in_main:
            self._remember(entry.block_id)
        self.discard(entry.slot, entry.owner)

    def _forget(self, entry: Entry) -> None:
        """Take a block without children from the sets; its slot stays."""
        if self._directory is not None:
            self._directory.remove(entry.block_id)
        self._dequeue(entry)
        del self._entries[entry.block_id]
        self._num_bytes -= entry.slot.num_bytes
        if entry.in_main:
            self._main_bytes -= entry.slot.num_bytes
        parent = self._entries.get(entry.parent_id) if entry.parent_id is not None else None
        if parent is not None:
            parent.children -= 1
            self._enqueue(parent, goes_first=True)

    def _remember(self, block_id: BlockId) -> None:
        self._ghosts[block_id] = None
        while len(self._ghosts) > len(self._entries):
            self._ghosts.popitem(last=False)


def _tenant(owner: bytes) -> bytes:
    """Whose quota an owner counts against, whatever its generation."""
    return owner[:TENANT_TAG_BYTES]
