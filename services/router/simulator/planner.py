"""How many workers a load needs: the capacity planner over simulated runs. Pure but for the runs."""

from __future__ import annotations

from collections.abc import Callable

MOST_WORKERS = 4096


class NotEnoughError(Exception):
    """No number of workers up to MOST_WORKERS is enough; the objectives are out of reach for some requests."""


def find_workers(meets: Callable[[int], bool], *, first: int = 1) -> int:
    """The least number of workers for which `meets` is true, if more workers never hurt. Raises NotEnoughError.

    Doubles from `first` on until one is enough, then bisects.
    """
    low, high = 0, max(1, first)
    while not meets(high):
        low, high = high, 2 * high
        if high > MOST_WORKERS:
            raise NotEnoughError(f"{low} workers do not meet the goodput that is wanted")
    while high - low > 1:
        middle = (low + high) // 2
        if meets(middle):
            high = middle
        else:
            low = middle
    return high
