"""What has gone wrong with one request since its last token, and when that is too much. Pure.

Any token makes up for everything before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_FIRST_PAUSE_S = 0.05
_LAST_PAUSE_S = 1.0


@dataclass(slots=True)
class Setbacks:
    """excluded: workers that failed. failures: as many. silences: of workers that may only be slow.

    granted_at_s: the first grant since the last failure, 0 for none. unserved_at_s: since when there is no worker at
    all, 0 while there is one. Times are monotonic.
    """

    excluded: list[str] = field(default_factory=list)
    failures: int = 0
    silences: int = 0
    granted_at_s: float = 0.0
    unserved_at_s: float = 0.0
    _pause_s: float = _FIRST_PAUSE_S

    def granted(self, now_s: float) -> None:
        """A worker has been named."""
        self.granted_at_s = self.granted_at_s or now_s

    def progressed(self) -> None:
        """A token has come."""
        self.excluded.clear()
        self.failures, self.silences, self.granted_at_s, self.unserved_at_s = 0, 0, 0.0, 0.0
        self._pause_s = _FIRST_PAUSE_S

    def failed(self, worker_id: str) -> None:
        """A worker has failed: it is not to be asked again before all others."""
        self.excluded.append(worker_id)
        self.failures += 1
        self.silences, self.granted_at_s = 0, 0.0

    def unserved(self, now_s: float, most_s: float) -> float | None:
        """There is no worker, those that failed aside: seconds until the next ask, which may name any.

        None when this has been so for `most_s`.
        """
        self.unserved_at_s = self.unserved_at_s or now_s
        left_s = self.unserved_at_s + most_s - now_s
        if left_s <= 0:
            return None
        self.excluded.clear()
        pause_s, self._pause_s = self._pause_s, min(_LAST_PAUSE_S, 2 * self._pause_s)
        return min(pause_s, left_s)
