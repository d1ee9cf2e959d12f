"""Which adapters are in memory, and who waits for one. Pure: no clock, no files.

There is a fixed number of slots. A request holds the slot of its adapter from when it is given until its end; a slot
that nobody holds keeps its adapter until another adapter needs the room, the least recently held first. Where every
slot is held, requests wait in the order in which they came. Those whose adapter is there overtake them, but not once
the first has waited for OVERTAKE_S: it would wait for ever otherwise. The loaded adapters have at most a number of
bytes together; how large one is shows when it has been read, and those that nobody holds make room for it then.

Invariants: an adapter has at most one slot; a slot that is held or being loaded is never given away; whoever asks is
given a slot, told that it failed, told that it is late, or released, exactly one of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

OVERTAKE_S = 1.0


@dataclass(slots=True)
class _Slot:
    """num_bytes: of a loaded one. holders: requests that use it or will once it is loaded. turn: when it was last held,
    as a count.
    """

    digest: bytes = b""
    is_loaded: bool = False
    num_bytes: int = 0
    holders: dict[int, float] = field(default_factory=dict)
    turn: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether another adapter may have it."""
        return not self.holders and (self.is_loaded or not self.digest)


@dataclass(frozen=True, slots=True)
class Load:
    """An adapter that is to be loaded into a slot, whose former one is gone. key: of the request that wants it."""

    slot: int
    digest: bytes
    key: int


class Residency:
    """Owner of the slots. `serve` decides; `take_granted` and `take_loads` give what it has decided."""

    def __init__(self, num_slots: int, *, max_waiting: int, max_bytes: int) -> None:
        """max_waiting: requests that may wait for a slot. max_bytes: of all loaded adapters."""
        self.evictions = 0
        self._max_bytes = max_bytes
        # Of the smallest adapter that was to be loaded; 0: none was.
        self._least_bytes = 0
        self._slots = [_Slot() for _ in range(num_slots)]
        self._by_digest: dict[bytes, int] = {}
        # Slot of each request that holds one.
        self._held: dict[int, int] = {}
        # Adapter and time of those that wait for a slot, in the order in which they came.
        self._waiting: dict[int, tuple[bytes, float]] = {}
        self._max_waiting = max_waiting
        self._turn = 0
        self._granted: list[tuple[int, int]] = []
        self._loads: list[Load] = []

    @property
    def resident(self) -> list[bytes]:
        """Digests of the loaded adapters, the most recently held first."""
        loaded = [slot for slot in self._slots if slot.is_loaded]
        return [slot.digest for slot in sorted(loaded, key=lambda slot: -slot.turn)]

    @property
    def resident_bytes(self) -> int:
        """Of the loaded adapters."""
        return sum(slot.num_bytes for slot in self._slots)

    @property
    def num_idle(self) -> int:
        """Slots that another adapter could have now."""
        return sum(slot.is_idle for slot in self._slots)

    @property
    def num_open(self) -> int:
        """The same as far as those that are held leave memory, for adapters as small as any so far."""
        if not self._least_bytes:
            return self.num_idle
        held = sum(slot.num_bytes or self._least_bytes for slot in self._slots if not slot.is_idle)
        return min(self.num_idle, max(0, self._max_bytes - held) // self._least_bytes)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiting)

    @property
    def is_settled(self) -> bool:
        """Whether nobody waits, for a slot or for a load."""
        loading = any(slot.digest and not slot.is_loaded for slot in self._slots)
        return not self._waiting and not loading and not self._granted

    def holders(self, slot: int) -> set[int]:
        """Requests that hold the slot."""
        return set(self._slots[slot].holders)

    def waits(self, key: int) -> bool:
        """Whether the request waits for a slot."""
        return key in self._waiting

    def has_slot(self, digest: bytes) -> bool:
        """Whether the adapter has one, loaded or not."""
        return digest in self._by_digest

    def has_room(self, digest: bytes) -> bool:
        """Whether a request for this adapter may ask."""
        if len(self._waiting) < self._max_waiting:
            return True
        return not self._waiting and (digest in self._by_digest or self.num_idle > 0)

    def ask(self, key: int, digest: bytes, now: float) -> None:
        """Request `key`, which holds and waits for nothing, wants a slot with this adapter; there must be room."""
        assert key not in self._held
        assert key not in self._waiting
        self._waiting[key] = (digest, now)
        self.serve(now)

    def release(self, key: int) -> None:
        """The request needs its slot no more, or waits no longer. Idempotent."""
        self._waiting.pop(key, None)
        slot = self._held.pop(key, None)
        if slot is not None:
            del self._slots[slot].holders[key]
            self._granted = [(one, number) for one, number in self._granted if one != key]

    def make_room(self, num_bytes: int) -> list[int] | None:
        """The slots whose adapters have given way to one of so many bytes; None, and none has, where they cannot."""
        self._least_bytes = min(num_bytes, self._least_bytes or num_bytes)
        missing = self.resident_bytes + num_bytes - self._max_bytes
        emptied: list[int] = []
        for number in sorted(self._idle(), key=lambda number: self._slots[number].turn):
            if missing > 0 and self._slots[number].is_loaded:
                missing -= self._slots[number].num_bytes
                emptied.append(number)
        if missing > 0:
            return None
        for number in emptied:
            self._empty(number)
            self.evictions += 1
        return emptied

    def loaded(self, slot: int, num_bytes: int) -> None:
        """The adapter of a slot is there; room has been made for it."""
        self._slots[slot].is_loaded = True
        self._slots[slot].num_bytes = num_bytes
        self._granted += [(key, slot) for key in self._slots[slot].holders]

    def failed(self, slot: int) -> list[int]:
        """The adapter of a slot could not be loaded; the requests that wanted it, which are forgotten."""
        entry = self._slots[slot]
        keys = list(entry.holders)
        for key in keys:
            del self._held[key]
        # Empty, it is taken before any that has an adapter: what cannot be loaded drives out one other at most.
        self._empty(slot)
        return keys

    def late(self, now: float, max_wait_s: float) -> list[int]:
        """Requests that have waited longer than that, for a slot or for a load; they are forgotten."""
        loading = [slot for slot in self._slots if not slot.is_loaded]
        asked = [(key, since) for key, (_, since) in self._waiting.items()]
        asked += [pair for slot in loading for pair in slot.holders.items()]
        keys = [key for key, since in asked if now - since > max_wait_s]
        for key in keys:
            self.release(key)
        return keys

    def drop_absent(self) -> list[int]:
        """Requests that wait for a slot for an adapter that has none; they are forgotten."""
        keys = [key for key, (digest, _) in self._waiting.items() if not self.has_slot(digest)]
        for key in keys:
            self.release(key)
        return keys

    def take_granted(self) -> list[tuple[int, int]]:
        """Requests with the slots that they have been given, loaded."""
        granted, self._granted = self._granted, []
        return granted

    def take_loads(self) -> list[Load]:
        """What is to be loaded."""
        loads, self._loads = self._loads, []
        return loads

    def serve(self, now: float) -> None:
        """Give slots to those who wait, as far as the rules allow."""
        blocked_since: float | None = None
        for key, (digest, since) in list(self._waiting.items()):
            if blocked_since is not None and now - blocked_since > OVERTAKE_S:
                return
            slot = self._by_digest.get(digest)
            if slot is None and blocked_since is None:
                slot = self._room_for(digest, key)
            if slot is not None:
                self._hold(key, slot, since)
            elif blocked_since is None:
                blocked_since = since

    def _hold(self, key: int, slot: int, since: float) -> None:
        del self._waiting[key]
        entry = self._slots[slot]
        self._turn += 1
        entry.turn = self._turn
        entry.holders[key] = since
        self._held[key] = slot
        if entry.is_loaded:
            self._granted.append((key, slot))

    def _room_for(self, digest: bytes, key: int) -> int | None:
        """A slot that is to be loaded with the adapter; None when all are held."""
        slot = min(self._idle(), key=lambda number: self._slots[number].turn, default=None)
        if slot is None:
            return None
        former = self._slots[slot].digest
        if former:
            del self._by_digest[former]
            self.evictions += 1
        self._slots[slot] = _Slot(digest)
        self._by_digest[digest] = slot
        self._loads.append(Load(slot, digest, key))
        return slot

    def _empty(self, slot: int) -> None:
        del self._by_digest[self._slots[slot].digest]
        self._slots[slot] = _Slot()

    def _idle(self) -> Iterator[int]:
        return (number for number, slot in enumerate(self._slots) if slot.is_idle)
