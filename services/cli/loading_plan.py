"""Which models a local mesh loads and unloads, from what routers say of their pools. Pure.

A model that requests wait for is loaded while there are places. Where there are none, the loaded model that nobody has
used for longest goes first, one for each that waits, but never one with work, and none that has only just come.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# A model that has been loaded is not given up for another before nobody has used it for so long.
LEAST_IDLE_S = 2.0


@dataclass(frozen=True, slots=True)
class PoolState:
    """A model's pool as the routers see it together. is_wanted: none of them would have it go."""

    waiting: int = 0
    running: int = 0
    idle_s: float = 0.0
    is_wanted: bool = True

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits."""
        return not self.waiting and not self.running


@dataclass(frozen=True, slots=True)
class Changes:
    """Models to load now, and those to unload, by name."""

    load: tuple[str, ...] = ()
    unload: tuple[str, ...] = ()


def merged(pools: Iterable[PoolState]) -> PoolState:
    """One model's pool from what several routers say, each of which may have missed something."""
    seen = list(pools)
    return PoolState(
        waiting=max(pool.waiting for pool in seen),
        running=max(pool.running for pool in seen),
        idle_s=min(pool.idle_s for pool in seen),
        is_wanted=any(pool.is_wanted for pool in seen),
    )


def changes(
    known: Iterable[str], pools: Mapping[str, PoolState], loaded: Mapping[str, bool], max_loaded: int
) -> Changes:
    """known: models that may be loaded. pools: of those that routers know. loaded: by model, whether it may go.

    Who may not is starting, or is going already; it has its place until it is gone.
    """
    nothing = PoolState(is_wanted=False)
    wanted = sorted(
        (name for name in known if name not in loaded and pools.get(name, nothing).waiting),
        key=lambda name: (-pools[name].waiting, name),
    )
    places = max(0, max_loaded - len(loaded))
    settled = [name for name, may_go in loaded.items() if may_go and name in pools and pools[name].is_idle]
    unload = [name for name in settled if not pools[name].is_wanted]
    others = sorted(
        (name for name in settled if name not in unload and pools[name].idle_s >= LEAST_IDLE_S),
        key=lambda name: (-pools[name].idle_s, name),
    )
    going = len(unload) + sum(not may_go for may_go in loaded.values())
    short = len(wanted) - places - going
    return Changes(tuple(wanted[:places]), tuple(unload + others[: max(0, short)]))
