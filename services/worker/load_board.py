"""The replica's present load, and the watchers who are told of it: every 250 ms, and at once when something changes.

A replica of which a process has fallen silent reports nothing, which is how watchers learn of it. The engine speaks
every 100 ms, or 200 ms while it has no requests, another rank every 100 ms. What the front repeats after the last word
of one of them says how old that is, so that watchers count their limit of 1 s from there. In a pause of the front
itself nobody could be heard: it counts as nobody's silence.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator

from services.common.own_pauses import OwnPauses
from services.worker.engine_messages import EngineLoad

# Names of attempts kept for a watcher that does not read; a router resynchronises from the counts then.
_MAX_NAMES = 4096


class Watcher:
    """One reader of reports."""

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        self._admitted: deque[str] = deque(maxlen=_MAX_NAMES)
        self._ended: deque[str] = deque(maxlen=_MAX_NAMES)

    def note(self, *, admitted: str = "", ended: str = "") -> None:
        """An attempt has been admitted or has ended."""
        if admitted:
            self._admitted.append(admitted)
        if ended:
            self._ended.append(ended)

    def take(self) -> tuple[list[str], list[str]]:
        """Admitted and ended attempts since the last call."""
        names = list(self._admitted), list(self._ended)
        self._admitted.clear()
        self._ended.clear()
        return names


class LoadBoard:
    """Latest load, readiness, and when the children were last heard."""

    def __init__(self, *, engine_silence_s: float = 0.35, mover_silence_s: float = 3.0) -> None:
        self.load: EngineLoad | None = None
        self.ready = False
        self.draining = False
        self._engine_silence_s = engine_silence_s
        self._mover_silence_s = mover_silence_s
        self._engine_heard_s = 0.0
        self._mover_heard_s = 0.0
        # Of ranks other than the engine, by role.
        self.ranks_heard_s: dict[str, float] = {}
        self._pauses = OwnPauses()
        self._watchers: set[Watcher] = set()

    def reset(self, now: float) -> None:
        """A new replica begins: nothing is known of it, its silence counts from now, and nobody watches it yet."""
        self.load = None
        self._engine_heard_s = self._mover_heard_s = now
        self.ready = self.draining = False
        self.ranks_heard_s = {}
        self._pauses = OwnPauses()
        self._watchers.clear()

    def publish(self, load: EngineLoad) -> None:
        """A load has come from the engine."""
        self.load = load
        self._wake_watchers()

    def engine_heard(self, now: float) -> None:
        """The engine has said something."""
        self._engine_heard_s = now

    def mover_heard(self, now: float) -> None:
        """The mover has said something."""
        self._mover_heard_s = now

    def tick(self, now: float) -> None:
        """Call every `TICK_S` of services/common/own_pauses.py: notice pauses of this process."""
        self._pauses.tick(now)

    def silences_s(self, now: float) -> list[float]:
        """How long the other ranks in their order, the engine and the mover have been silent."""
        at_s = now - self._pauses.excused_s(now)
        heard_s = (*self.ranks_heard_s.values(), self._engine_heard_s, self._mover_heard_s)
        return [max(0.0, at_s - one_s) for one_s in heard_s]

    def computing_silence_s(self, now: float) -> float:
        """The longest of them but the mover's, which may say nothing for a while."""
        return max(self.silences_s(now)[:-1])

    def is_silent(self, now: float) -> bool:
        """Whether a child has been silent for so long that it may be stopped."""
        *computing, mover = self.silences_s(now)
        return max(computing) > self._engine_silence_s or mover > self._mover_silence_s

    def set_draining(self) -> None:
        """No admissions from now on."""
        self.draining = True
        self._wake_watchers()

    def note_admitted(self, name: str) -> None:
        """An attempt has its place."""
        for watcher in self._watchers:
            watcher.note(admitted=name)
        self._wake_watchers()

    def note_ended(self, name: str) -> None:
        """An admitted attempt is over, however it ended."""
        for watcher in self._watchers:
            watcher.note(ended=name)
        self._wake_watchers()

    @contextlib.contextmanager
    def watch(self) -> Iterator[Watcher]:
        """A watcher for the time of the context."""
        watcher = Watcher()
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)

    def _wake_watchers(self) -> None:
        for watcher in self._watchers:
            watcher.wake.set()
