"""How fast a queue drains, for forecasts of when the rest of it will have. Pure."""

from __future__ import annotations

from services.common.decaying_sum import DecayingSum

_WINDOW_S = 10.0


class BusyDrain:
    """The rate at which a queue drains while somebody waits in it: what its servers can do, not what they are asked."""

    def __init__(self) -> None:
        self._served = DecayingSum(_WINDOW_S)
        self._busy_s = 0.0
        self._since_s: float | None = None

    def busy(self, is_busy: bool, now_s: float) -> None:
        """Whether anybody waits from now on. now_s: any clock, the same in all calls."""
        if self._since_s is not None:
            self._busy_s += now_s - self._since_s
        self._since_s = now_s if is_busy else None

    def add(self, amount: float, now_s: float) -> None:
        """So much was served now; counted while somebody waits."""
        if self._since_s is not None:
            self._served.add(amount, self._clock_s(now_s))

    def forecast_s(self, amount: float, now_s: float) -> float | None:
        """Seconds until `amount` is served; None where nobody has waited yet."""
        per_s = self._served.rate(self._clock_s(now_s))
        return amount / per_s if per_s > 0 else None

    def _clock_s(self, now_s: float) -> float:
        return self._busy_s + (now_s - self._since_s if self._since_s is not None else 0.0)
