"""How fast an engine that drains goes on: no faster than when the drain began, while its requests leave. Pure.

With ever fewer sequences its steps take ever less time. Nobody asked for that, the workers that catch up with what is
said here could not, and one on the same host would lack the processor time (hypervisors throttle a guest for the same
reason: QEMU's auto-converge). Where nobody leaves, for want of another worker, what is here had better end soon.
"""

from __future__ import annotations

import math

# Since the last request left, or the drain began.
_LEAVES_WITHIN_S = 1.0


class DrainPace:
    """Times are of one clock, in seconds."""

    def __init__(self) -> None:
        self._step_s = 0.0
        self._left_at_s = -math.inf

    def begin(self, decode_step_s: float, now: float) -> None:
        """The drain begins. decode_step_s: what a step takes at present."""
        self._step_s, self._left_at_s = decode_step_s, now

    def left(self, now: float) -> None:
        """A request has gone, perhaps to another worker."""
        self._left_at_s = now

    def least_step_s(self, now: float) -> float:
        """From the start of a step to that of the next one; 0 where it does not matter."""
        return self._step_s if now - self._left_at_s < _LEAVES_WITHIN_S else 0.0
