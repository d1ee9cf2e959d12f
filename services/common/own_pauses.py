"""Pauses of this very process, which must not be taken for silence of everybody else. Pure."""

from __future__ import annotations

from dataclasses import dataclass

# Period of the ticks, the delay of one that counts as a pause, and the time to read what has arrived during it.
TICK_S = 0.25
_PAUSE_S = 0.2
_CATCH_UP_S = 0.5


@dataclass(slots=True)
class OwnPauses:
    """Learns of a pause from a late tick; what arrived meanwhile is read soon after."""

    ticked_s: float | None = None
    pause_s: float = 0.0
    catch_up_until_s: float = 0.0

    def tick(self, now_s: float) -> None:
        """Call every `TICK_S`."""
        late_s = self._late_s(now_s)
        if late_s > _PAUSE_S:
            self.pause_s, self.catch_up_until_s = late_s, now_s + _CATCH_UP_S
        self.ticked_s = now_s

    def excused_s(self, now_s: float) -> float:
        """Seconds by which others may be more silent than usual."""
        recent_s = self.pause_s if now_s < self.catch_up_until_s else 0.0
        late_s = self._late_s(now_s)
        return recent_s + (late_s if late_s > _PAUSE_S else 0.0)

    def _late_s(self, now_s: float) -> float:
        return 0.0 if self.ticked_s is None else max(0.0, now_s - self.ticked_s - TICK_S)
