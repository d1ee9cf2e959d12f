"""How far a pull has come, run by run, and whether it keeps up with computing the same blocks.

The race is the engine's bargain (worker/pull_choice.py): blocks that come later than computing them would have taken,
by more than the pull's patience, are not worth waiting for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.worker.link_messages import RunTiming

# A race that seems lost is looked at once more after this: what arrived while this process was kept from running
# counts, whichever the loop hears of first.
_SECOND_LOOK_S = 0.01


class PullProgress:
    """Tiers of the verified leading blocks, the timing of each run, and why the pull ended.

    Cancelling a task that has not begun would end it without a PullDone, so that is only noted.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.started_s = clock()
        self.has_begun = False
        self.is_cancelled = False
        # The blocks that counted when the pull was given up.
        self.cut_blocks: int | None = None
        self.tiers: list[str] = []
        self.transports: set[str] = set()
        self.timings: list[RunTiming] = []
        self.error = ""
        self._clock = clock
        self._run_first = 0
        self._run_blocks = 0
        self._run_started_s = self.started_s
        self._first_block_s = 0.0

    @property
    def num_blocks(self) -> int:
        """Blocks that the engine may use."""
        return len(self.tiers) if self.cut_blocks is None else self.cut_blocks

    def begin_run(self, num_blocks: int) -> None:
        """The next run is asked for."""
        self._run_first, self._run_blocks = len(self.tiers), num_blocks
        self._run_started_s, self._first_block_s = self._clock(), 0.0

    def arrived(self, tier: str) -> None:
        """The next block is verified."""
        if len(self.tiers) == self._run_first:
            self._first_block_s = self._clock() - self._run_started_s
        self.tiers.append(tier)

    def end_run(self, outcome: str) -> None:
        """The run that was begun is over, or given up; only the first call for a run counts."""
        if not self._run_blocks:
            return
        tiers = self.tiers[self._run_first :]
        seconds = self._clock() - self._run_started_s
        if outcome == "short" and len(tiers) == self._run_blocks:
            outcome = "ok"
        self.timings.append(RunTiming(len(tiers), tiers.count("ssd"), self._first_block_s, seconds, outcome))
        self._run_blocks = 0


class Race:
    """Calls `on_lost` once when a pull is `patience_s` behind computing a block every `block_compute_s`."""

    def __init__(
        self, progress: PullProgress, patience_s: float, block_compute_s: float, on_lost: Callable[[], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._progress = progress
        self._patience_s = patience_s
        self._block_compute_s = block_compute_s
        self._on_lost = on_lost
        self._in_doubt = False
        self._began_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        if patience_s > 0:
            self._timer = self._loop.call_at(self._lost_s(), self._look)

    def end(self) -> None:
        """The pull is over."""
        if self._timer is not None:
            self._timer.cancel()

    def _lost_s(self) -> float:
        """When the race is lost if nothing more arrives."""
        return self._began_s + self._patience_s + self._progress.num_blocks * self._block_compute_s

    def _look(self) -> None:
        lost_s, now_s = self._lost_s(), self._loop.time()
        if now_s < lost_s:
            self._in_doubt = False
            self._timer = self._loop.call_at(lost_s, self._look)
        elif not self._in_doubt:
            self._in_doubt = True
            self._timer = self._loop.call_at(now_s + _SECOND_LOOK_S, self._look)
        else:
            self._on_lost()
