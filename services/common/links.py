"""What moving blocks costs, as workers learn it and routers count with it. Pure.

Pulling n bytes from one tier of one holder takes setup_s + n / bytes_per_s. What has never been measured is assumed,
rather too fast: a pull that falls behind is cut (worker/pull_choice.py), so that trying costs little, and teaches.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """setup_s: to the first byte."""

    bytes_per_s: float
    setup_s: float

    def seconds(self, num_bytes: float) -> float:
        """Time to pull `num_bytes`."""
        return self.setup_s + num_bytes / self.bytes_per_s


# Memory of a holder on this host and on another one; and what an SSD adds to its node's setup, reading included.
NEAR = Link(2e9, 0.002)
FAR = Link(300e6, 0.004)
SSD = Link(500e6, 0.005)
# An unmeasured link is taken to move blocks at least so many times as fast as the worker computes them, or a fast
# worker would never try one, and never learn.
WORTH_TRYING = 2.0


def faded(measured: Link, assumed: Link, freshness: float) -> Link:
    """What to count with when a measurement has aged: a bad figure goes back (geometrically) to the assumed one.

    One slow time would otherwise end all pulls, and with them every chance to measure a better one. A good figure
    stays: pulls go on and correct it.
    """
    rate = measured.bytes_per_s**freshness * assumed.bytes_per_s ** (1.0 - freshness)
    setup_s = measured.setup_s**freshness * assumed.setup_s ** (1.0 - freshness)
    return Link(max(measured.bytes_per_s, rate), min(measured.setup_s, setup_s))
