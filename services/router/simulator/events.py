"""Simulated time: what is to happen, in order of time and, at one time, of when it was planned. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Events:
    """now_s: simulated seconds since the start."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._order = 0
        self._planned: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, at_s: float, act: Callable[[], None]) -> None:
        """Plan `act`."""
        self._order += 1
        heapq.heappush(self._planned, (at_s, self._order, act))

    def run(self) -> None:
        """Until nothing is planned any more."""
        while self._planned:
            self.now_s, _, act = heapq.heappop(self._planned)
            act()
