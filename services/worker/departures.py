"""In which order the readers of a worker that drains are asked to go on elsewhere: a share of them at a time. Pure.

Each that goes costs another worker a pull and a few steps. All at once would hold each other up there, and the streams
that have gone already with them, while those that stay go on here and lose nothing by waiting. Who does not go
within `patience_s` of being asked, for want of another worker, no longer keeps the next from being asked.
"""

from __future__ import annotations

from collections.abc import Iterable

# So many turns until all have been asked, if all go at once.
_TURNS = 8


class Departures:
    """Attempts by key, in the order in which they are added. Times are of one clock, in seconds."""

    def __init__(self, keys: Iterable[int], patience_s: float) -> None:
        self._waiting = dict.fromkeys(keys)
        self._patience_s = patience_s
        self._at_once = max(1, -(-len(self._waiting) // _TURNS))
        # When each of those that still have their turn was asked.
        self._asked: dict[int, float] = {}

    def add(self, key: int) -> None:
        """One more is to go."""
        self._waiting[key] = None

    def gone(self, key: int) -> None:
        """One has gone, or has ended. Idempotent, and nothing for those that are not to go."""
        self._waiting.pop(key, None)
        self._asked.pop(key, None)

    def due(self, now_s: float) -> list[int]:
        """Who is to be asked now; each is named once."""
        self._asked = {key: at_s for key, at_s in self._asked.items() if now_s - at_s < self._patience_s}
        asked = list(self._waiting)[: max(0, self._at_once - len(self._asked))]
        for key in asked:
            del self._waiting[key]
            self._asked[key] = now_s
        return asked

    def next_s(self) -> float | None:
        """When somebody is due at the latest; None while nobody waits."""
        return min(self._asked.values(), default=0.0) + self._patience_s if self._waiting else None
