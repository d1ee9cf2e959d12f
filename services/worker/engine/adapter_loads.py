"""Loads of adapters on threads of their own, of which none keeps the others waiting. Takes time as an argument.

A read may hang for good (a network file system whose server is gone), and nothing can end a thread that does. So each
load has a thread, a few run at once, and one that is slow no longer counts among these. One that is not done in time
is given up: its slot is free again and what it may still bring is dropped, but its thread is counted until it ends, and
while it is there the same adapter is refused at once. One that gets no thread in that time is given up as well; where
all threads hang (`is_stuck`) none should begin. Threads are daemons: one that hangs does not keep the process from
ending.

Owned by the loop's thread; only futures are shared with the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from services.common.adapter_files import InvalidAdapter
from services.worker.adapters.source import AdapterRef
from services.worker.model.adapter import PreparedAdapter

# Loads at once that are not slow.
_AT_ONCE = 2
# A load is slow from then on.
_SLOW_S = 1.0
# With those that were given up.
MOST_THREADS = 8

# The adapter in the decoder's form, and the seconds that took.
Loaded = tuple[PreparedAdapter, float]


class LoadStalled(InvalidAdapter):
    """The files do not come."""

    def __init__(self) -> None:
        super().__init__("its files cannot be read in time")


@dataclass(slots=True)
class _Load:
    """asked_s: when it was begun; started_s: when it got a thread, None while it waits for one."""

    slot: int
    adapter: AdapterRef
    future: Future[Loaded]
    asked_s: float
    started_s: float | None = None


class AdapterLoads:
    """stalls: loads that were given up so far."""

    def __init__(self, load: Callable[[AdapterRef], Loaded], *, most_s: float) -> None:
        """load: runs on the threads. most_s: a load that takes longer, or waits longer for a thread, is given up."""
        self.stalls = 0
        self._load = load
        self._most_s = most_s
        self._loads: dict[int, _Load] = {}
        self._given_up: list[_Load] = []

    @property
    def num_given_up(self) -> int:
        """Loads that were given up and whose threads are still there."""
        return len(self._given_up)

    @property
    def is_stuck(self) -> bool:
        """Whether all threads hang."""
        return self.num_given_up >= MOST_THREADS

    def begin(self, slot: int, adapter: AdapterRef, now: float) -> None:
        """Load an adapter for a slot for which nothing is being loaded."""
        assert slot not in self._loads
        load = _Load(slot, adapter, Future(), now)
        self._loads[slot] = load
        if any(one.adapter == adapter for one in self._given_up):
            load.future.set_exception(LoadStalled())
        self._start_waiting(now)

    def take(self, now: float) -> list[tuple[int, AdapterRef, Future[Loaded]]]:
        """The loads that have ended since, or were given up: futures that are done."""
        self._given_up = [one for one in self._given_up if not one.future.done()]
        ended = [one for one in self._loads.values() if one.future.done()]
        ended += [self._give_up(one) for one in self._loads.values() if self._is_late(one, now)]
        for one in ended:
            del self._loads[one.slot]
        self._start_waiting(now)
        return [(one.slot, one.adapter, one.future) for one in ended]

    def _is_late(self, load: _Load, now: float) -> bool:
        since_s = load.asked_s if load.started_s is None else load.started_s
        return now - since_s > self._most_s and not load.future.done()

    def _give_up(self, load: _Load) -> _Load:
        """What is told in its place; its own future is its thread's, if it has one."""
        self.stalls += 1
        if load.started_s is not None:
            self._given_up.append(load)
        stalled: Future[Loaded] = Future()
        stalled.set_exception(LoadStalled())
        return replace(load, future=stalled)

    def _start_waiting(self, now: float) -> None:
        running = [one for one in self._loads.values() if one.started_s is not None and not one.future.done()]
        num_fast = sum(now - one.started_s <= _SLOW_S for one in running if one.started_s is not None)
        room = min(_AT_ONCE - num_fast, MOST_THREADS - len(running) - len(self._given_up))
        waiting = [one for one in self._loads.values() if one.started_s is None and not one.future.done()]
        for one in waiting[: max(0, room)]:
            one.started_s = now
            threading.Thread(target=self._run, args=(one,), name="adapter", daemon=True).start()

    def _run(self, load: _Load) -> None:
        try:
            loaded = self._load(load.adapter)
        except BaseException as error:
            load.future.set_exception(error)
        else:
            load.future.set_result(loaded)
