"""How many lines run at a time: more while they are taken, half as many when one is refused. Pure.

Additive increase, multiplicative decrease, as of congestion windows (Chiu and Jain, 1989). Times are monotonic seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

_FIRST = 4.0
_MOST_PAUSE_S = 30.0


@dataclass(slots=True)
class Pace:
    """most: never more lines than this. `limit` now."""

    most: int
    _limit: float = _FIRST
    _paused_until_s: float = 0.0

    @property
    def limit(self) -> int:
        """Lines that may run at a time, at least 1."""
        return max(1, min(self.most, int(self._limit)))

    def pause_s(self, now_s: float) -> float:
        """Until the next line may begin."""
        return max(0.0, self._paused_until_s - now_s)

    def answered(self) -> None:
        """A line was answered: once all that run are, one more may."""
        self._limit = min(float(self.most), self._limit + 1.0 / self.limit)

    def refused(self, retry_after_s: float, now_s: float) -> None:
        """A line was refused for now. Those that were refused together count once."""
        if now_s >= self._paused_until_s:
            self._limit = max(1.0, self._limit / 2)
        self._paused_until_s = max(self._paused_until_s, now_s + min(retry_after_s, _MOST_PAUSE_S))
