"""How fast something gets done, for forecasts of when the rest will be. Pure."""

from __future__ import annotations

import math


class DrainRate:
    """Amount per second over about the last `window_s`, older amounts fading exponentially."""

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._amount = 0.0
        self._at_s: float | None = None
        self._began_s = 0.0

    def add(self, amount: float, now_s: float) -> None:
        """So much was done now. now_s: any clock, the same in all calls."""
        if self._at_s is None:
            self._began_s = now_s
        self._amount = self._faded(now_s) + amount
        self._at_s = now_s

    def per_s(self, now_s: float) -> float:
        """Amount per second; 0 before anything was done."""
        if self._at_s is None:
            return 0.0
        # What a constant rate of 1/s would have left by now.
        seen_s = self._window_s * -math.expm1(-(now_s - self._began_s) / self._window_s)
        return self._faded(now_s) / max(seen_s, 0.1)

    def forecast_s(self, amount: float, now_s: float) -> float | None:
        """Seconds until `amount` is done at this rate; None where nothing is known."""
        rate = self.per_s(now_s)
        return amount / rate if rate > 0 else None

    def _faded(self, now_s: float) -> float:
        return 0.0 if self._at_s is None else self._amount * math.exp(-(now_s - self._at_s) / self._window_s)


class BusyDrain:
    """The rate at which a queue drains while somebody waits in it: what its servers can do, not what they are asked."""

    def __init__(self) -> None:
        self._rate = DrainRate()
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
            self._rate.add(amount, self._clock_s(now_s))

    def forecast_s(self, amount: float, now_s: float) -> float | None:
        """Seconds until `amount` is served; None where nobody has waited yet."""
        return self._rate.forecast_s(amount, self._clock_s(now_s))

    def _clock_s(self, now_s: float) -> float:
        return self._busy_s + (now_s - self._since_s if self._since_s is not None else 0.0)
