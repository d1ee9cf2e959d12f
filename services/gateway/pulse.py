"""One timer for all streams: it notices silent workers and sends heartbeats, so that no token pays for a timer."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Pulsed(Protocol):
    """Something that looks at the clock now and then."""

    def pulse(self, now_s: float) -> None:
        """now_s: the running loop's time. Must not wait."""


class Pulse:
    """Calls `pulse` of everything registered, every `interval_s`."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._members: set[Pulsed] = set()

    def add(self, member: Pulsed) -> None:
        """Register."""
        self._members.add(member)

    def discard(self, member: Pulsed) -> None:
        """Unregister; idempotent."""
        self._members.discard(member)

    def __len__(self) -> int:
        return len(self._members)

    async def run(self) -> None:
        """Beat until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._interval_s)
            now_s = loop.time()
            for member in list(self._members):
                member.pulse(now_s)
