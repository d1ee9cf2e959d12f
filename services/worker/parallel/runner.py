"""The runner of a group, on rank 0: every step goes to all ranks, and ends when all have finished it.

So a block that a step has filled is in the pool with the heads and layers of every rank before the core hears of it.
What breaks off in the midst of a step leaves the ranks out of step: whatever it was, the group is lost.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import structlog
import torch

from services.worker.errors import RankLost
from services.worker.model.runner import CpuRunner, RunnerSpec
from services.worker.model.step import StepInput
from services.worker.parallel.group import Group
from services.worker.parallel.step_link import StepLink

# What others begin to take for silence is 0.35 s.
_LONG_S = 0.2
_log = structlog.get_logger()


class ParallelRunner:
    """A Runner (model/step.py) over a rank's own and links to the others, in the order of the ranks."""

    def __init__(self, own: CpuRunner, group: Group, links: Sequence[StepLink]) -> None:
        self._own = own
        self._group = group
        self._links = links

    @property
    def spec(self) -> RunnerSpec:
        """Of the whole replica."""
        return self._own.spec

    def submit(self, step: StepInput) -> None:
        """Start a step on all ranks, blocks being in place. Raises ValueError, nothing being started; RankLost."""
        self._settle()
        self._own.submit(step)
        for link in self._links:
            link.send(step)

    def collect(self) -> torch.Tensor:
        """Wait until every rank has finished the step; float32 logits [L, vocab_size]. Raises RankLost."""
        try:
            logits = self._group.receive_logits(self._own.collect())
            for link in self._links:
                link.wait_done()
        except RankLost:
            raise
        except Exception as error:
            raise RankLost(f"a step broke off: {type(error).__name__}: {error}") from error
        return logits

    def _settle(self) -> None:
        began_s = time.monotonic()
        for link in self._links:
            link.settle()
        took_s = time.monotonic() - began_s
        if took_s > _LONG_S:
            _log.warning("a step waited for blocks on their way between hosts", seconds=round(took_s, 3))

    def hidden(self) -> torch.Tensor:
        """Of the step that was collected last, where there is one stage: every rank has all of it."""
        assert self._group.is_last, "settings that would ask for it are refused where there are stages"
        return self._own.hidden()
