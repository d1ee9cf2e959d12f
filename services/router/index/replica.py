"""What every location has announced, and the block map made of it.

Pure and synchronous: announcements go in, in the order of their stream, and the answer says whether the location must
be read anew (a gap in its sequence numbers, a whole set whose beginning was missed, a digest that does not agree).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from services.common.announcements import Header, Kind, unpack_xor
from services.common.blocks import BlockId
from services.router.index.block_map import BlockMap, Runs


class Applied(Enum):
    """What became of an announcement."""

    YES = "applied"
    OLD = "old"
    GAP = "gap"
    DIVERGED = "diverged"


@dataclass(slots=True)
class Location:
    """One location's set. seq: the last announcement applied. verify_from: digests are meaningless before it."""

    slot: int
    epoch: int
    seq: int = 0
    verify_from: int = 0
    xor: int = 0
    tiers: dict[BlockId, int] = field(default_factory=dict)
    # The whole set that is being announced; `tiers` itself while that is empty.
    staged: dict[BlockId, int] | None = None

    def agrees(self, count: int, xor: int) -> bool:
        """Whether the holder's digest is ours."""
        return count == len(self.tiers) and xor == self.xor


class Replica:
    """All locations."""

    def __init__(self) -> None:
        self.blocks = BlockMap()
        self.locations: dict[str, Location] = {}
        # Raised whenever a location comes, goes or changes its epoch: what was derived from slots is stale then.
        self.version = 0

    def find(self, ids: Sequence[BlockId]) -> Runs:
        """Which slot holds how many of the leading `ids`."""
        return self.blocks.find(ids)

    def apply(
        self, name: str, header: Header, adds: Sequence[tuple[BlockId, int]], removes: Sequence[BlockId]
    ) -> Applied:
        """One announcement of location `name`; GAP and DIVERGED ask for the set to be read anew."""
        location = self.locations.get(name)
        if location is not None and (header.epoch, header.seq) <= (location.epoch, location.seq):
            return Applied.OLD
        if header.kind & Kind.RETIRE:
            self.retire(name)
            return Applied.YES
        if header.kind & Kind.BEGIN:
            location = self._begin(name, header.epoch)
        elif location is None or (header.epoch, header.seq) != (location.epoch, location.seq + 1):
            return Applied.GAP
        location.seq = header.seq
        if header.kind & Kind.STAGED:
            return self._stage(location, header, adds)
        self._remove(location, removes)
        self._add(location, adds)
        return _verified(location, header)

    def begin_load(self, name: str, epoch: int) -> None:
        """A location's set is about to be read anew, in parts; until `end_load` its sequence number is 0."""
        self._begin(name, epoch).seq = 0

    def load_part(self, name: str, entries: Iterable[tuple[BlockId, int]]) -> None:
        """Some entries of the set."""
        self._stage_adds(self.locations[name], entries)

    def end_load(self, name: str, seq: int, *, verify_from: int) -> None:
        """The set is read: with everything up to `seq` and perhaps parts of what came up to `verify_from`."""
        location = self.locations[name]
        self._commit(location)
        location.seq = seq
        location.verify_from = verify_from

    def retire(self, name: str) -> None:
        """The location is gone; what it held is swept later."""
        location = self.locations.pop(name, None)
        if location is not None:
            self.version += 1
            self.blocks.retire_slot(location.slot, location.tiers)

    def _begin(self, name: str, epoch: int) -> Location:
        location = self.locations.get(name)
        if location is None or location.epoch != epoch:
            self.retire(name)
            location = self.locations[name] = Location(self.blocks.new_slot(), epoch)
            self.version += 1
        location.staged = {} if location.tiers else location.tiers
        return location

    def _stage(self, location: Location, header: Header, adds: Sequence[tuple[BlockId, int]]) -> Applied:
        missed_begin = location.staged is None
        self._stage_adds(location, adds)
        if not header.kind & Kind.COMMIT:
            return Applied.YES
        if missed_begin:
            return Applied.GAP
        self._commit(location)
        return _verified(location, header)

    def _stage_adds(self, location: Location, adds: Iterable[tuple[BlockId, int]]) -> None:
        if location.staged is location.tiers:
            self._add(location, adds)
        elif location.staged is not None:
            location.staged.update(adds)

    def _commit(self, location: Location) -> None:
        wanted, location.staged = location.staged, None
        if wanted is not None and wanted is not location.tiers:
            self._remove(location, [id_ for id_ in location.tiers if id_ not in wanted])
            self._add(location, wanted.items())

    def _add(self, location: Location, adds: Iterable[tuple[BlockId, int]]) -> None:
        tiers = location.tiers
        new = []
        for id_, tier in adds:
            if id_ not in tiers:
                new.append(id_)
                location.xor ^= unpack_xor(id_)
            tiers[id_] = tier
        self.blocks.add(location.slot, new)

    def _remove(self, location: Location, removes: Iterable[BlockId]) -> None:
        gone = [id_ for id_ in removes if location.tiers.pop(id_, None) is not None]
        for id_ in gone:
            location.xor ^= unpack_xor(id_)
        self.blocks.discard(location.slot, gone)


def _verified(location: Location, header: Header) -> Applied:
    if header.seq < location.verify_from or location.agrees(header.count, header.xor):
        return Applied.YES
    return Applied.DIVERGED
