"""Blocks of which some KV heads have not come yet. Pure: time comes in as an argument, memory from the RAM tier.

The ranks of a tensor-parallel replica push the heads that they own, each by itself. Until all heads have come a block
is here and nowhere else: not announced, not lent, not spilled. Then it enters the RAM tier under the header that the
parts make up, as if it had come whole. A part is taken only where the same heads of the parent are here, so a block
is never whole before its parent. Parts are written in place, each by one claimant at a time and never again once it
is verified: the first verified one wins. What stays incomplete for too long goes, with what hangs on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from services.common.blocks import BlockId
from services.common.transfer.header import BlockHeader
from services.common.transfer.heads import HeadRange
from services.kvstore.arena import Slot
from services.kvstore.errors import PartRefused
from services.kvstore.ram_tier import RamTier
from services.kvstore.reservations import Offered
from services.kvstore.ssd_loader import Allocate

# Told how many blocks went incomplete, and why.
Dropped = Callable[[int, str], None]


@dataclass(slots=True, eq=False)
class Partial:
    """One incomplete block. checksums: of the verified heads. gone: dropped, its slot is freed with the last claim."""

    common: BlockHeader
    slot: Slot
    until_s: float
    checksums: dict[int, int] = field(default_factory=dict)
    claimed: set[int] = field(default_factory=set)
    gone: bool = False

    def has(self, heads: HeadRange) -> bool:
        """Whether all of these are verified."""
        return all(head in self.checksums for head in range(heads.first, heads.end))


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """The right to write one part, until `accept` or `release`."""

    header: BlockHeader
    partial: Partial


@dataclass(frozen=True, slots=True)
class PartialStatistics:
    """Counts of one moment; bytes are those reserved for whole blocks."""

    num_blocks: int
    num_bytes: int
    max_bytes: int
    dropped_blocks: int


class PartialBlocks:
    """Owns the slots of incomplete blocks, at most `max_bytes` of them, each for at most `max_age_s`."""

    def __init__(self, ram: RamTier, allocate: Allocate, dropped: Dropped, *, max_bytes: int, max_age_s: float) -> None:
        self._ram = ram
        self._allocate = allocate
        self._tell_dropped = dropped
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        # By age, parents before children.
        self._blocks: dict[BlockId, Partial] = {}
        self._num_bytes = 0
        self._dropped = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def statistics(self) -> PartialStatistics:
        """A snapshot."""
        return PartialStatistics(len(self._blocks), self._num_bytes, self._max_bytes, self._dropped)

    @property
    def next_expiry_s(self) -> float | None:
        """When the oldest goes; None when there are none."""
        return next((partial.until_s for partial in self._blocks.values()), None)

    def holds(self, header: BlockHeader) -> bool:
        """Whether the part that `header` is of need not come: the block is whole, or has it."""
        if header.block_id in self._ram:
            return True
        partial = self._blocks.get(header.block_id)
        return partial is not None and partial.has(header.covered) and partial.common == _common(header)

    def has_under(self, header: BlockHeader) -> bool:
        """Whether what the part hangs on is here: nothing, a whole block, or the same heads of an incomplete one."""
        if header.starts_chain or header.parent_id in self._ram:
            return True
        parent = self._blocks.get(header.parent_id)
        return parent is not None and parent.has(header.covered)

    def claim(self, header: BlockHeader, now_s: float) -> Claim:
        """Room to write one part. Raises PartRefused."""
        common, heads = _common(header), header.covered
        if header.block_id in self._ram:
            raise PartRefused("here under another parent")
        partial = self._blocks.get(header.block_id)
        if partial is None:
            partial = self._open(common, now_s)
        if partial.common != common:
            raise PartRefused("differs from the other heads")
        wanted = set(range(heads.first, heads.end))
        if wanted & (partial.claimed | partial.checksums.keys()):
            raise PartRefused("heads on their way already")
        partial.claimed |= wanted
        return Claim(header, partial)

    def memory(self, claim: Claim) -> memoryview:
        """Where the claimed part is to be written."""
        return claim.header.covered.share(self._ram.memory(claim.partial.slot), claim.header.num_kv_heads)

    def accept(self, claim: Claim) -> bool:
        """The part is written and verified. False when it cannot be kept any more; it is then still to be released."""
        partial, header = claim.partial, claim.header
        if partial.gone or not self.has_under(header):
            return False
        for head, checksum in enumerate(header.checksums, header.covered.first):
            partial.claimed.remove(head)
            partial.checksums[head] = checksum
        return True

    def complete(self, block_id: BlockId, created_s: int) -> Offered | None:
        """Give the RAM tier a block of which all heads are verified; None when some are not, or RAM has no parent."""
        partial = self._blocks.get(block_id)
        if partial is None or len(partial.checksums) < partial.common.num_kv_heads:
            return None
        checksums = tuple(partial.checksums[head] for head in range(partial.common.num_kv_heads))
        header = partial.common.completed(checksums)
        encoded = header.encode()
        del self._blocks[block_id]
        parent_id = None if header.starts_chain else header.parent_id
        owner = header.owner_digest
        if self._ram.insert(block_id, parent_id, partial.slot, encoded, owner=owner, created_s=created_s):
            self._num_bytes -= partial.slot.num_bytes
            return Offered(header, encoded)
        self._end(partial, "no parent")
        return None

    def release(self, claim: Claim) -> None:
        """The part did not come, or is not kept; nobody writes it any more."""
        partial, heads = claim.partial, claim.header.covered
        partial.claimed.difference_update(range(heads.first, heads.end))
        if partial.gone:
            self._free(partial)
        elif not partial.claimed and not partial.checksums:
            del self._blocks[partial.common.block_id]
            partial.gone = True
            self._free(partial)

    def expire(self, now_s: float) -> None:
        """Drop what has been incomplete for too long."""
        expired = set[BlockId]()
        for block_id, partial in self._blocks.items():
            if partial.until_s > now_s:
                break
            expired.add(block_id)
        self._drop(expired, "heads missing")

    def clear(self, is_dead: Callable[[bytes], bool]) -> None:
        """Drop the blocks of dead owners."""
        dead = {block_id for block_id, partial in self._blocks.items() if is_dead(partial.common.owner_digest)}
        self._drop(dead, "cleared")

    def superseded(self, block_id: BlockId) -> None:
        """The whole block has come by another way: what hangs on it stays."""
        if (partial := self._blocks.pop(block_id, None)) is not None:
            self._end(partial, "came whole")

    def check(self) -> None:
        """Raises AssertionError when something disagrees; for tests and idle moments."""
        assert self._num_bytes <= self._max_bytes
        assert self._num_bytes >= sum(partial.slot.num_bytes for partial in self._blocks.values())
        for block_id, partial in self._blocks.items():
            assert block_id == partial.common.block_id
            assert block_id not in self._ram
            assert not partial.gone
            assert not partial.claimed & partial.checksums.keys()
            assert partial.claimed or partial.checksums
            assert len(partial.checksums) < partial.common.num_kv_heads

    def _open(self, common: BlockHeader, now_s: float) -> Partial:
        size = common.payload_bytes
        if self._num_bytes + size > self._max_bytes:
            raise PartRefused("too many incomplete blocks")
        slot = self._allocate(size, common.owner_digest)
        if slot is None:
            raise PartRefused("no room")
        self._num_bytes += size
        partial = self._blocks[common.block_id] = Partial(common, slot, now_s + self._max_age_s)
        return partial

    def _drop(self, doomed: set[BlockId], reason: str) -> None:
        """Drop these and what hangs on them."""
        if not doomed:
            return
        for block_id, partial in list(self._blocks.items()):
            if partial.common.parent_id in doomed:
                doomed.add(block_id)
            if block_id in doomed:
                del self._blocks[block_id]
                self._end(partial, reason)

    def _end(self, partial: Partial, reason: str) -> None:
        partial.gone = True
        self._dropped += 1
        self._tell_dropped(1, reason)
        self._free(partial)

    def _free(self, partial: Partial) -> None:
        if not partial.claimed:
            self._num_bytes -= partial.slot.num_bytes
            self._ram.discard(partial.slot, partial.common.owner_digest)


def _common(header: BlockHeader) -> BlockHeader:
    """What the headers of all parts of a block must agree in."""
    return replace(header, part=HeadRange(0, 1), checksums=())
