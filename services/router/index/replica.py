"""What every location has announced, and the block map made of it.

Pure and synchronous: announcements go in, in the order of their stream, and the answer says whether the location must
be read anew (a gap in its sequence numbers, a whole set whose beginning was missed, a digest that does not agree). A
whole set is built beside the one that is shown and takes its place at once when it is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from services.common.announcements import Header, Kind
from services.common.blocks import BlockId
from services.router.index.block_map import BlockMap, HeldSet
from services.router.index.runs import Runs


class Applied(Enum):
    """What became of an announcement."""

    YES = "applied"
    OLD = "old"
    GAP = "gap"
    DIVERGED = "diverged"


@dataclass(slots=True)
class Location:
    """One location's set. seq: the last announcement applied. verify_from: digests are meaningless before it."""

    epoch: int
    held: HeldSet
    seq: int = 0
    verify_from: int = 0
    # The whole set that is being announced or read.
    staged: HeldSet | None = None

    @property
    def slot(self) -> int:
        """Its number in what `find` answers; another one after each whole set."""
        return self.held.slot

    @property
    def num_blocks(self) -> int:
        """Blocks held."""
        return self.held.count

    def agrees(self, count: int, xor: int) -> bool:
        """Whether the holder's digest is ours."""
        return (count, xor) == (self.held.count, self.held.xor)


class Replica:
    """All locations."""

    def __init__(self) -> None:
        self.blocks = BlockMap()
        self.locations: dict[str, Location] = {}
        # Raised whenever a location comes, goes or changes its slot: what was derived from slots is stale then.
        self.version = 0

    def find(self, ids: Sequence[BlockId]) -> Runs:
        """Which slot holds how many of the leading `ids`."""
        return self.blocks.find(ids)

    def is_on_ssd(self, name: str, id_: BlockId) -> bool:
        """Whether the location `name` has the block on an SSD."""
        return self.blocks.is_on_ssd(self.locations[name].held, id_)

    def apply(
        self, name: str, header: Header, adds: Sequence[tuple[BlockId, int]], removes: Sequence[BlockId]
    ) -> Applied:
        """One announcement of location `name`; GAP and DIVERGED ask for the set to be read anew."""
        location = self.locations.get(name)
        if location is not None and (header.epoch, header.seq) <= (location.epoch, location.seq):
            return Applied.OLD
        if Kind.RETIRE in header.kind:
            self.retire(name)
            return Applied.YES
        if Kind.BEGIN in header.kind:
            location = self._begin(name, header.epoch)
        elif location is None or (header.epoch, header.seq) != (location.epoch, location.seq + 1):
            return Applied.GAP
        location.seq = header.seq
        if Kind.STAGED in header.kind:
            return self._stage(location, header, adds)
        if removes:
            self.blocks.remove(location.held, removes)
        if adds:
            self.blocks.add(location.held, adds)
        return _verified(location, header)

    def begin_load(self, name: str, epoch: int) -> None:
        """A location's set is about to be read anew, in parts; until `end_load` its sequence number is 0."""
        self._begin(name, epoch).seq = 0

    def load_part(self, name: str, entries: Iterable[tuple[BlockId, int]]) -> None:
        """Some entries of the set."""
        staged = self.locations[name].staged
        assert staged is not None
        self.blocks.add(staged, entries)

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
            self.blocks.retire(location.held)
            self._drop_staged(location)

    def _begin(self, name: str, epoch: int) -> Location:
        location = self.locations.get(name)
        if location is None or location.epoch != epoch:
            self.retire(name)
            location = self.locations[name] = Location(epoch, self.blocks.new_set())
            self.blocks.show(location.held)
            self.version += 1
        self._drop_staged(location)
        location.staged = self.blocks.new_set()
        return location

    def _drop_staged(self, location: Location) -> None:
        if location.staged is not None:
            self.blocks.retire(location.staged)
            location.staged = None

    def _stage(self, location: Location, header: Header, adds: Sequence[tuple[BlockId, int]]) -> Applied:
        if location.staged is not None:
            self.blocks.add(location.staged, adds)
        if Kind.COMMIT not in header.kind:
            return Applied.YES
        if location.staged is None:
            return Applied.GAP
        self._commit(location)
        return _verified(location, header)

    def _commit(self, location: Location) -> None:
        assert location.staged is not None
        self.blocks.retire(location.held)
        location.held, location.staged = location.staged, None
        self.blocks.show(location.held)
        self.version += 1


def _verified(location: Location, header: Header) -> Applied:
    if header.seq < location.verify_from or location.agrees(header.count, header.xor):
        return Applied.YES
    return Applied.DIVERGED
