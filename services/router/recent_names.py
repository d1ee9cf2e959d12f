"""The last names seen, bounded. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

_MOST = 1024


class RecentNames:
    """A set that forgets its oldest names."""

    def __init__(self, most: int = _MOST) -> None:
        self._order: deque[str] = deque(maxlen=most)
        self._names: set[str] = set()

    def add(self, names: Iterable[str]) -> None:
        """Names just seen; one seen before keeps its place."""
        for name in names:
            if name in self._names:
                continue
            if len(self._order) == self._order.maxlen:
                self._names.discard(self._order[0])
            self._order.append(name)
            self._names.add(name)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)
