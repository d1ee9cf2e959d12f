"""One timer for all streams: it notices silent workers and silent streams, so that no token pays for a timer.

It also sees how far the event loop is behind, and derives the pace at which streams write. It stands still while
nothing is registered, and beats slowly while there is nothing to pace.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import structlog

# The pace of writes is a multiple of the loop's lag; a lag below the first is noise.
MIN_LAG_S = 0.003
MAX_PACE_S = 0.1
_PACE_PER_LAG = 4.0
_log = structlog.get_logger("gateway.pulse")


def pace_of(lag_s: float) -> float:
    """Least time between two writes of a stream when timers fire `lag_s` late."""
    return 0.0 if lag_s < MIN_LAG_S else min(MAX_PACE_S, _PACE_PER_LAG * lag_s)


class Pulsed(Protocol):
    """Something that looks at the clock now and then."""

    def pulse(self, now_s: float) -> None:
        """now_s: the running loop's time, which is the monotonic clock. Must not wait."""


class Pulse:
    """Calls `pulse` of everything registered, every `interval_s`; every `paced_interval_s` while writes are paced."""

    def __init__(self, interval_s: float, paced_interval_s: float) -> None:
        self._interval_s = interval_s
        self._paced_interval_s = min(interval_s, paced_interval_s)
        self._members: set[Pulsed] = set()
        self._wanted = asyncio.Event()
        self.lag_s = 0.0
        self.pace_s = 0.0

    def add(self, member: Pulsed) -> None:
        """Register."""
        self._members.add(member)
        self._wanted.set()

    def discard(self, member: Pulsed) -> None:
        """Unregister; idempotent."""
        self._members.discard(member)

    def __len__(self) -> int:
        return len(self._members)

    @property
    def is_still(self) -> bool:
        """Whether it waits, without a timer, for something to be registered."""
        return not self._wanted.is_set()

    async def run(self) -> None:
        """Beat until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            if not self._members:
                self.lag_s = self.pace_s = 0.0
                self._wanted.clear()
                await self._wanted.wait()
            interval_s = self._paced_interval_s if self.pace_s else self._interval_s
            due_s = loop.time() + interval_s
            await asyncio.sleep(interval_s)
            now_s = loop.time()
            self.lag_s += (max(0.0, now_s - due_s) - self.lag_s) / 4
            self.pace_s = pace_of(self.lag_s)
            for member in list(self._members):
                self._touch(member, now_s)

    def _touch(self, member: Pulsed, now_s: float) -> None:
        """One member's bug must not stop the pulse of all others."""
        try:
            member.pulse(now_s)
        except Exception:
            self._members.discard(member)
            _log.exception("pulse_failed", member=type(member).__name__)
