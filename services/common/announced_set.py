"""The set of blocks that a location holds, and which part of it the index does not know yet.

Pure and synchronous. An entry is a tier, a mark that the index has it, and a mark that it is gone here but still in
the index. Memory is bounded by what the holder holds plus what it has announced.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from services.common.announcements import Kind, pack_adds, unpack_xor
from services.common.blocks import BlockId

# Adds and removes of one announcement; bounds the size of a stream entry and the time of the script.
BATCH_IDS = 256

_TIER, _ANNOUNCED, _GONE = 0x0F, 0x10, 0x20


@dataclass(frozen=True, slots=True)
class Batch:
    """What one announcement says; count and xor are those of the announced set once it is applied."""

    kind: Kind
    adds: bytes
    removes: bytes
    count: int
    xor: int


class AnnouncedSet:
    """`add`, `remove` and `clear` change the set; `next_batch` takes what must be announced next."""

    def __init__(self) -> None:
        self._entries: dict[BlockId, int] = {}
        self._dirty: dict[BlockId, None] = {}
        # The whole set that is being announced, from the position staged_at on.
        self._staging: list[BlockId] | None = None
        self._staged_at = 0
        self._stage_anew = True
        self._gone = 0
        self._count = 0
        self._xor = 0

    def __len__(self) -> int:
        """Blocks held now."""
        return len(self._entries) - self._gone

    @property
    def pending(self) -> bool:
        """Whether the index lacks something."""
        return self._stage_anew or self._staging is not None or bool(self._dirty)

    @property
    def digest(self) -> tuple[int, int]:
        """Count and XOR of what has been announced."""
        return self._count, self._xor

    def add(self, ids: Iterable[BlockId], tier: int) -> None:
        """`ids` are held in `tier` now; prefix order."""
        entries = self._entries
        for id_ in ids:
            old = entries.get(id_)
            if old is None:
                entries[id_] = tier
            elif old & ~_ANNOUNCED == tier:
                continue
            else:
                self._gone -= bool(old & _GONE)
                entries[id_] = tier | (old & _ANNOUNCED)
            self._dirty[id_] = None

    def remove(self, ids: Iterable[BlockId]) -> None:
        """`ids` are no longer held; descendants first. Unknown ids are ignored."""
        for id_ in ids:
            old = self._entries.get(id_)
            if old is None or old & _GONE:
                continue
            if old & _ANNOUNCED:
                self._entries[id_] = _ANNOUNCED | _GONE
                self._gone += 1
                self._dirty[id_] = None
            else:
                del self._entries[id_]
                self._dirty.pop(id_, None)

    def clear(self) -> None:
        """Nothing is held any more."""
        self._entries.clear()
        self._dirty.clear()
        self._gone = 0
        self.announce_all()

    def announce_all(self) -> None:
        """Announce the whole set anew, as after the index has lost it."""
        self._stage_anew = True

    def next_batch(self) -> Batch | None:
        """The next announcement; counts as announced from now on. None when the index knows everything."""
        if self._stage_anew:
            self._begin_staging()
        if self._staging is not None:
            return self._next_staged(self._staging)
        return self._next_change() if self._dirty else None

    def _begin_staging(self) -> None:
        self._entries = {id_: entry & _TIER for id_, entry in self._entries.items() if not entry & _GONE}
        self._gone = 0
        self._dirty.clear()
        self._staging = list(self._entries)
        self._staged_at = 0
        self._stage_anew = False
        self._count = 0
        self._xor = 0

    def _next_staged(self, staging: list[BlockId]) -> Batch:
        kind = Kind.STAGED if self._staged_at else Kind.STAGED | Kind.BEGIN
        chunk = staging[self._staged_at : self._staged_at + BATCH_IDS]
        self._staged_at += BATCH_IDS
        if self._staged_at >= len(staging):
            self._staging = None
            kind |= Kind.COMMIT
        # What has left since the staging began is left out; what has come since is dirty and follows.
        return self._batch(kind, [id_ for id_ in chunk if id_ in self._entries])

    def _next_change(self) -> Batch:
        ids = list(islice(self._dirty, BATCH_IDS))
        return self._batch(Kind.CHANGE, ids)

    def _batch(self, kind: Kind, ids: list[BlockId]) -> Batch:
        adds: list[tuple[BlockId, int]] = []
        removes: list[BlockId] = []
        for id_ in ids:
            self._dirty.pop(id_, None)
            entry = self._entries[id_]
            if entry & _GONE:
                removes.append(id_)
                del self._entries[id_]
                self._gone -= 1
                self._toggle(id_, -1)
                continue
            adds.append((id_, entry & _TIER))
            if not entry & _ANNOUNCED:
                self._entries[id_] = entry | _ANNOUNCED
                self._toggle(id_, 1)
        return Batch(kind, pack_adds(adds), b"".join(removes), self._count, self._xor)

    def _toggle(self, id_: BlockId, change: int) -> None:
        self._count += change
        self._xor ^= unpack_xor(id_)
