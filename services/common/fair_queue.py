"""Who is served next: requests of one model by class, and within a class by weighted virtual token counters. Pure.

A more urgent class goes first. A less urgent one that waits gets one turn after `starve_grants` turns of others, and
after `starve_s` without a turn: that turn counts as the most urgent class, so that whoever decides about it does not
put it off again, and no two such turns follow each other. A turn is open until it is taken or given up: taken, it is
charged by estimate, and settled later with what was really computed; one that came to nothing is put back at the front
of its tenant's line. No turn is withheld while anybody waits; whoever waits alone is served at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice
from typing import Generic, TypeVar

from services.common.virtual_counters import VirtualCounters

T = TypeVar("T")
# Turns of one tenant that are put back in another order than they were taken in, at most.
_MOST_AT_ONCE = 64


class RequestClass(IntEnum):
    """The values of proto PriorityClass, the most urgent first."""

    INTERACTIVE = 1
    STANDARD = 2
    BATCH = 3


NUM_CLASSES = len(RequestClass)


def class_index(priority: int) -> int:
    """Place of a proto PriorityClass among all, the most urgent first; one that is not set counts as that."""
    return min(max(priority, 1), NUM_CLASSES) - 1


@dataclass(frozen=True, slots=True)
class StarvationBound:
    """When a class that waits gets a turn before more urgent ones."""

    starve_s: float = 10.0
    starve_grants: int = 20


@dataclass(slots=True, eq=False)
class Entry(Generic[T]):
    """A request in the queue. cost: estimated, in the prices of VirtualCounters.

    order: of arrival. is_kept: it goes first in its class, and makes no room for others. is_promoted: its turn came by
    the starvation bound. held, charged: of its tenant, for an open turn and for one that was taken.
    """

    item: T
    tenant: str
    request_class: RequestClass
    cost: float
    order: int = 0
    is_kept: bool = False
    is_promoted: bool = False
    held: float = 0.0
    charged: float = 0.0

    @property
    def asks_as(self) -> RequestClass:
        """The class that its turn counts as."""
        return RequestClass.INTERACTIVE if self.is_promoted else self.request_class


@dataclass(slots=True, eq=False)
class _Line(Generic[T]):
    """The requests of one class. since_s: last turn, or the beginning of the wait where that is later."""

    counters: VirtualCounters
    tenants: dict[str, OrderedDict[int, Entry[T]]] = field(default_factory=dict)
    since_s: float = 0.0
    others_turns: int = 0

    def add(self, entry: Entry[T], *, at_front: bool = False) -> None:
        waiting = self.tenants.get(entry.tenant)
        if waiting is None:
            self.counters.join(entry.tenant, self.tenants.keys())
            waiting = self.tenants[entry.tenant] = OrderedDict()
        goes_between = at_front and not entry.is_kept
        older = [order for order in islice(waiting, _MOST_AT_ONCE) if order < entry.order] if goes_between else []
        waiting[entry.order] = entry
        if at_front:
            for order in (entry.order, *reversed(older)):
                waiting.move_to_end(order, last=False)

    def remove(self, entry: Entry[T]) -> None:
        waiting = self.tenants[entry.tenant]
        del waiting[entry.order]
        if not waiting:
            del self.tenants[entry.tenant]
            self.counters.leave(entry.tenant)

    def first(self) -> Entry[T]:
        """What is kept, else the oldest of the tenant that was served least; among equals, of the shortest line."""

        def place(tenant: str) -> tuple[bool, float, int]:
            waiting = self.tenants[tenant]
            return (not next(iter(waiting.values())).is_kept, self.counters.rank(tenant), len(waiting))

        return next(iter(self.tenants[min(self.tenants, key=place)].values()))


class FairQueue(Generic[T]):
    """Owner of the waiting requests of one model. Bounds are the caller's: see `displaced`."""

    def __init__(self, weight_of: Callable[[str], float], bound: StarvationBound) -> None:
        """weight_of: a tenant's share against others, above 0."""
        self.weight_of = weight_of
        self._bound = bound
        self._lines: dict[RequestClass, _Line[T]] = {kind: _Line(VirtualCounters(weight_of)) for kind in RequestClass}
        self._by_tenant: dict[str, int] = {}
        self._arrivals = 0
        self._promoted_last = False
        self.num_waiting = 0
        self.cost_waiting = 0.0

    def __iter__(self) -> Iterator[Entry[T]]:
        """All that wait, in no order that means anything."""
        for line in self._lines.values():
            for waiting in line.tenants.values():
                yield from waiting.values()

    def num_waiting_of(self, tenant: str) -> int:
        """Requests of one tenant that wait."""
        return self._by_tenant.get(tenant, 0)

    def push(self, entry: Entry[T], now_s: float) -> None:
        """Wait at the end of the tenant's line. now_s: any clock, the same in all calls."""
        self._arrivals += 1
        entry.order = self._arrivals
        line = self._lines[entry.request_class]
        if not line.tenants:
            line.since_s, line.others_turns = now_s, 0
        line.add(entry)
        self._count(entry, 1)

    def pop(self, now_s: float, below: int = RequestClass.BATCH + 1) -> Entry[T] | None:
        """Open the next turn among those that count as a class more urgent than `below`; None when there is none."""
        kind = self._next_class(now_s, below)
        if kind is None:
            return None
        line = self._lines[kind]
        entry = line.first()
        entry.is_promoted = any(self._lines[other].tenants for other in RequestClass if other < kind)
        self._promoted_last = entry.is_promoted
        line.remove(entry)
        self._count(entry, -1)
        line.since_s, line.others_turns = now_s, 0
        self._note_turn(kind, 1)
        entry.held = line.counters.hold(entry.tenant, entry.cost)
        return entry

    def take(self, entry: Entry[T]) -> None:
        """An open turn has come to something: charge it."""
        self._release(entry)
        self._charge(entry, entry.cost)

    def give_up(self, entry: Entry[T]) -> None:
        """Charge nothing for a turn, open or taken."""
        self._release(entry)
        self._charge(entry, -entry.charged)

    def put_back(self, entry: Entry[T]) -> None:
        """Give up a turn, open or taken, and wait for the next one."""
        self.give_up(entry)
        line = self._lines[entry.request_class]
        line.add(entry, at_front=True)
        self._count(entry, 1)
        self._note_turn(entry.request_class, -1)
        if entry.is_promoted:
            line.others_turns, self._promoted_last = self._bound.starve_grants, False

    def remove(self, entry: Entry[T]) -> None:
        """Give up waiting."""
        self._lines[entry.request_class].remove(entry)
        self._count(entry, -1)

    def settle(self, entry: Entry[T], cost: float) -> None:
        """Replace what was charged for a turn that was taken by what was computed."""
        self._charge(entry, cost - entry.charged)

    def served(self, tenant: str, kind: RequestClass) -> float:
        """What a tenant has been served in a class, in cost over weight."""
        return self._lines[kind].counters.of(tenant)

    def least_entitled(self) -> Entry[T] | None:
        """Who goes first when there is too little room: the newest of the longest line of the least urgent class.

        Lines are compared by their number over the tenant's weight.
        """
        for line in reversed(self._lines.values()):
            by_length = sorted(line.tenants.items(), key=lambda of: len(of[1]) / self.weight_of(of[0]), reverse=True)
            for _, waiting in by_length:
                newest = next((entry for entry in reversed(waiting.values()) if not entry.is_kept), None)
                if newest is not None:
                    return newest
        return None

    def cost_ahead(self, tenant: str, kind: RequestClass) -> float:
        """Cost of what is served before a newcomer.

        All of more urgent classes, its tenant's own line, and of every other line of its class as much as its weight
        gives that one meanwhile.
        """
        own = sum(entry.cost for entry in self._lines[kind].tenants.get(tenant, {}).values())
        ahead = own
        for other_kind, line in self._lines.items():
            for other, waiting in line.tenants.items():
                cost = sum(entry.cost for entry in waiting.values())
                if other_kind < kind:
                    ahead += cost
                elif other_kind == kind and other != tenant:
                    ahead += min(cost, own * self.weight_of(other) / self.weight_of(tenant))
        return ahead

    def line_length(self, tenant: str, kind: RequestClass) -> int:
        """Requests of one tenant that wait in a class."""
        return len(self._lines[kind].tenants.get(tenant, ()))

    def _next_class(self, now_s: float, below: int) -> RequestClass | None:
        waiting = [kind for kind, line in self._lines.items() if line.tenants]
        starving = [kind for kind in waiting[1:] if self._is_starving(kind, now_s)]
        if starving and below > RequestClass.INTERACTIVE and not self._promoted_last:
            return min(starving, key=lambda kind: self._lines[kind].since_s)
        return next((kind for kind in waiting if kind < below), None)

    def _is_starving(self, kind: RequestClass, now_s: float) -> bool:
        line = self._lines[kind]
        return line.others_turns >= self._bound.starve_grants or now_s - line.since_s >= self._bound.starve_s

    def _note_turn(self, kind: RequestClass, count: int) -> None:
        for other, line in self._lines.items():
            if other != kind and line.tenants:
                line.others_turns = max(0, line.others_turns + count)

    def _release(self, entry: Entry[T]) -> None:
        held, entry.held = entry.held, 0.0
        if held:
            self._lines[entry.request_class].counters.release(entry.tenant, held)

    def _charge(self, entry: Entry[T], cost: float) -> None:
        self._lines[entry.request_class].counters.charge(entry.tenant, cost)
        entry.charged += cost

    def _count(self, entry: Entry[T], change: int) -> None:
        self.num_waiting += change
        self.cost_waiting = self.cost_waiting + change * entry.cost if self.num_waiting else 0.0
        left = self._by_tenant.get(entry.tenant, 0) + change
        if left:
            self._by_tenant[entry.tenant] = left
        else:
            del self._by_tenant[entry.tenant]


def displaced(entry: Entry[T], queue: FairQueue[T], queues: Iterable[FairQueue[T]], most: int) -> Entry[T] | None:
    """Who has to go so that `entry` may wait in `queue`: nobody, `entry` itself, or somebody less entitled.

    queues: all that share the bound of `most` waiting requests, `queue` among them. A less urgent class makes room for
    a more urgent one; within a class a longer line does for one that would still be shorter.
    """
    every = list(queues)
    if sum(other.num_waiting for other in every) < most:
        return None
    victims = [(other, victim) for other in every if (victim := other.least_entitled()) is not None]
    if not victims:
        return entry

    def claim(of: FairQueue[T], whose: Entry[T], more: int = 0) -> tuple[int, float]:
        length = of.line_length(whose.tenant, whose.request_class) + more
        return (whose.request_class, length / of.weight_of(whose.tenant))

    worst_queue, worst = max(victims, key=lambda pair: claim(*pair))
    return worst if claim(worst_queue, worst) > claim(queue, entry, 1) else entry
