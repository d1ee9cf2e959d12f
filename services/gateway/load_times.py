"""How long it takes until a model that has no worker serves: as its last loads took, else by its size. Pure.

A load is learned from the first request that waited to the first worker that takes requests, so it holds all that a
request waits for: that somebody starts a process, that another model makes room, that weights are read and warmed up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_NEWEST_SHARE = 0.5
# A load that takes longer than forecast is expected to take this much of the time that it has taken already.
_OVERDUE_SHARE = 0.25
LEAST_S = 1.0


@dataclass(slots=True)
class LoadTimes:
    """Of some models. num_bytes: of their artifacts; a load not seen yet is start_s and the time to read those."""

    num_bytes: Mapping[str, int]
    bytes_per_s: float
    start_s: float
    _learned: dict[str, float] = field(default_factory=dict)

    def learn(self, model: str, seconds: float) -> None:
        """A load has taken so long."""
        before_s = self._learned.get(model, seconds)
        self._learned[model] = before_s + _NEWEST_SHARE * (seconds - before_s)

    def whole_s(self, model: str) -> float:
        """Of a load that begins now."""
        learned_s = self._learned.get(model)
        return self.start_s + self.num_bytes[model] / self.bytes_per_s if learned_s is None else learned_s

    def left_s(self, model: str, passed_s: float) -> float:
        """Of one that began so long ago; LEAST_S at least."""
        left_s = self.whole_s(model) - passed_s
        return max(LEAST_S, left_s if left_s > 0 else _OVERDUE_SHARE * passed_s)
