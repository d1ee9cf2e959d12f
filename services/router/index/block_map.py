"""Block id -> holders, in memory.

A holder is a small number (a slot); the holders of a block are a bit set, and equal bit sets are one object. Most
blocks of a prefix have the very same holders, so a walk over a prompt compares identities and looks closer only where
they change. What a removed holder leaves behind is swept in steps, so that removing a large one stops nobody; its
slot is reused after that. Memory is bounded by what the holders hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.common.blocks import BlockId

# Up to this many bits are taken out one by one, more of them with numpy.
_FEW_BITS = 8


class _Holders:
    """One bit set and the number of blocks that have it."""

    __slots__ = ("mask", "uses")

    def __init__(self, mask: int) -> None:
        self.mask = mask
        self.uses = 0


@dataclass(frozen=True, slots=True)
class Runs:
    """Who holds how much of a prompt: of each (length, mask), slots in `mask` hold exactly `length` leading blocks.

    Lengths rise and are 1 or more; slots in no mask hold none.
    """

    runs: tuple[tuple[int, int], ...]

    def lengths(self, num_slots: int) -> npt.NDArray[np.int32]:
        """Leading blocks held, by slot."""
        result = np.zeros(num_slots, np.int32)
        for length, mask in self.runs:
            result[slots_of(mask)] = length
        return result


def slots_of(mask: int) -> list[int] | npt.NDArray[np.int64]:
    """Numbers of the bits set in `mask`."""
    if mask.bit_count() > _FEW_BITS:
        raw = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
        return np.flatnonzero(np.unpackbits(raw, bitorder="little"))
    slots = []
    while mask:
        low = mask & -mask
        slots.append(low.bit_length() - 1)
        mask ^= low
    return slots


class BlockMap:
    """`add` and `discard` change one holder's blocks, `find` walks a prompt."""

    def __init__(self) -> None:
        self._blocks: dict[BlockId, _Holders] = {}
        self._interned: dict[int, _Holders] = {}
        self._live = 0
        self._free_slots: list[int] = []
        self._garbage: list[tuple[int, list[BlockId]]] = []
        self.num_slots = 0

    def __len__(self) -> int:
        """Distinct blocks, those of removed holders included until they are swept."""
        return len(self._blocks)

    @property
    def num_holder_sets(self) -> int:
        """Distinct holder sets."""
        return len(self._interned)

    def new_slot(self) -> int:
        """A slot for a new holder."""
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = self.num_slots
            self.num_slots += 1
        self._live |= 1 << slot
        return slot

    def retire_slot(self, slot: int, blocks: Iterable[BlockId]) -> None:
        """The holder is gone; `blocks` are all that it held. `find` shows it no more; `sweep` removes the rest."""
        self._live &= ~(1 << slot)
        self._garbage.append((slot, list(blocks)))

    def sweep(self, most: int) -> bool:
        """Remove up to `most` entries of retired holders; whether there is more."""
        while self._garbage and most > 0:
            slot, blocks = self._garbage[-1]
            chunk = blocks[-most:]
            del blocks[-most:]
            most -= len(chunk)
            self.discard(slot, chunk)
            if not blocks:
                self._garbage.pop()
                self._free_slots.append(slot)
        return bool(self._garbage)

    def add(self, slot: int, ids: Iterable[BlockId]) -> None:
        """`slot` holds `ids`, none of which it held before."""
        bit = 1 << slot
        get = self._blocks.get
        before: _Holders | None = None
        after: _Holders | None = None
        for id_ in ids:
            holders = get(id_)
            if after is None or holders is not before:
                before = holders
                after = self._intern(bit if holders is None else holders.mask | bit)
            self._replace(id_, holders, after)

    def discard(self, slot: int, ids: Iterable[BlockId]) -> None:
        """`slot` no longer holds `ids`, all of which it held."""
        keep = ~(1 << slot)
        for id_ in ids:
            holders = self._blocks[id_]
            rest = holders.mask & keep
            if rest:
                self._replace(id_, holders, self._intern(rest))
            else:
                del self._blocks[id_]
                self._release(holders)

    def find(self, ids: Sequence[BlockId]) -> Runs:
        """How many of the leading `ids` each live holder has."""
        runs: list[tuple[int, int]] = []
        alive = self._live
        previous: _Holders | None = None
        at = 0
        for at, holders in enumerate(map(self._blocks.get, ids)):
            if holders is previous and holders is not None:
                continue
            mask = holders.mask if holders is not None else 0
            ended = alive & ~mask
            if ended and at:
                runs.append((at, ended))
            alive &= mask
            if not alive:
                return Runs(tuple(runs))
            previous = holders
        if ids:
            runs.append((at + 1, alive))
        return Runs(tuple(runs))

    def _intern(self, mask: int) -> _Holders:
        found = self._interned.get(mask)
        if found is None:
            found = self._interned[mask] = _Holders(mask)
        return found

    def _replace(self, id_: BlockId, before: _Holders | None, after: _Holders) -> None:
        after.uses += 1
        self._blocks[id_] = after
        if before is not None:
            self._release(before)

    def _release(self, holders: _Holders) -> None:
        holders.uses -= 1
        if not holders.uses:
            del self._interned[holders.mask]
