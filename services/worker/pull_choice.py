"""Move or recompute, at the start of a pull: how much of a plan is worth it, and how long to be patient. Pure.

The router has decided on what it knew; this is decided with the worker's latest figures. Of the plan that part is
kept which makes pulling plus computing the rest fastest. The pull is then raced against computing: should it lag by
more than `patience_s` behind a computation that had begun at the same moment, it is cut and the rest computed. So a
slow link costs a request at most `patience_s`, which is never more than computing the blocks takes: the sixteenth
part of that, or 50 ms, and twice the time in which a pull as forecast shows nothing yet.

Blocks that another worker is computing for this request are always waited for and never raced: that worker answers the
client meanwhile, so that nobody waits for them, and computing them here would do the work twice. Nor does anybody wait
for an attempt that is held, while computing it holds up whoever else runs here: its blocks count as if computing them
took `HELD_WORTH` times as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from services.worker.link_rates import LinkRates
from services.worker.messages import HolderRun

_LEAST_PATIENCE_S = 0.05
_PATIENCE_SHARE = 1 / 16
HELD_WORTH = 4.0


@dataclass(frozen=True, slots=True)
class PullChoice:
    """What to pull; no runs when computing is faster. lag_s: how far such a pull lags behind computing at most."""

    runs: list[HolderRun]
    pull_s: float
    compute_s: float
    lag_s: float

    @property
    def waits(self) -> bool:
        """Whether some of it is still being computed by its holder."""
        return any(run.wait_s > 0 for run in self.runs)

    @property
    def patience_s(self) -> float:
        """How far behind computing it may fall; 0: as far as it likes."""
        if self.waits:
            return 0.0
        return min(self.compute_s, max(_LEAST_PATIENCE_S, self.compute_s * _PATIENCE_SHARE) + 2 * self.lag_s)


def choose_pull(plan: Sequence[HolderRun], links: LinkRates, *, block_compute_s: float, now: float) -> PullChoice:
    """The leading part of `plan` that is worth pulling when a block takes `block_compute_s` to compute."""
    awaited = max((number for number, run in enumerate(plan, 1) if run.wait_s > 0), default=0)
    if awaited:
        return PullChoice(list(plan[:awaited]), 0.0, 0.0, 0.0)
    best = PullChoice([], 0.0, 0.0, 0.0)
    for choice in _parts(plan, links, block_compute_s, now):
        if choice.pull_s - choice.compute_s < best.pull_s - best.compute_s:
            best = choice
    return best


def _parts(plan: Sequence[HolderRun], links: LinkRates, block_compute_s: float, now: float) -> Iterator[PullChoice]:
    """The plan up to the end of each run, and up to where each run goes on on an SSD."""
    runs: list[HolderRun] = []
    pull_s = lag_s = 0.0
    num_blocks = 0
    for run in plan:
        memory, ssd = links.memory(run, now), links.ssd(run, now)
        in_memory = run.num_blocks - run.num_ssd_blocks
        pull_s += links.queue_s(run, now) + memory.seconds(in_memory * links.block_bytes)
        lag_s += links.queue_s(run, now) + memory.seconds(links.block_bytes)
        if run.num_ssd_blocks:
            if in_memory:
                part = msgspec.structs.replace(run, num_blocks=in_memory, num_ssd_blocks=0)
                yield PullChoice([*runs, part], pull_s, (num_blocks + in_memory) * block_compute_s, lag_s)
            # Nothing is sent before all has been read.
            ssd_s = ssd.seconds(run.num_ssd_blocks * links.block_bytes)
            pull_s += ssd_s
            lag_s += ssd_s
        runs = [*runs, run]
        num_blocks += run.num_blocks
        yield PullChoice(runs, pull_s, num_blocks * block_compute_s, lag_s)
