"""A runner that computes nothing: its steps take the time of a model of time, and draw words by a hash.

Which word follows depends on the request's seed, the choice and the position alone, so that another replica goes on
with the same text. Penalties, bias and temperature change nothing; the word drawn has probability one.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np
from opentelemetry import metrics

from services.common.time_model import TimeModel
from services.worker.draws import DrawRow, Draws, ReadRow
from services.worker.messages import PositionLogprob
from services.worker.model.step import StepInput

# The host's work between two steps, and what a sleep overshoots, hide behind the device up to this much, as they do on
# a device whose steps are submitted ahead. Beyond it the simulated device stands idle for want of CPU, as it would.
_AHEAD_S = 0.002
# A sleep overshoots by about a tenth of this; shorter times are saved up.
_SHORTEST_SLEEP_S = 0.001
_DRAW = struct.Struct("<QIQ")
_late_s = metrics.get_meter("kvmesh.worker").create_histogram(
    "kvmesh_sim_late_seconds", unit="s", description="How late simulated steps ended for want of CPU."
)


class DeviceClock:
    """When the steps of a device that runs one at a time end. Pure: seconds of any one clock come in."""

    def __init__(self) -> None:
        # Until when the device is busy.
        self.busy_until_s = 0.0

    def start(self, now: float, step_s: float) -> None:
        """A step is handed to the device."""
        begins_s = self.busy_until_s if now - self.busy_until_s <= _AHEAD_S else now
        self.busy_until_s = begins_s + step_s

    def wait_s(self, now: float) -> float:
        """How long to sleep for the step's end; 0 while too little is left to sleep for."""
        left_s = self.busy_until_s - now
        return left_s if left_s >= _SHORTEST_SLEEP_S else 0.0


class SimRunner:
    """A StepRunner (loop.py)."""

    def __init__(
        self,
        time_model: TimeModel,
        words: Sequence[int],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """words: token ids to draw."""
        self._time_model = time_model
        self._words = words
        self._clock = clock
        self._sleep = sleep
        self._device = DeviceClock()

    def submit(self, step: StepInput) -> None:
        """Start a step. A sequence with one token in it decodes, and so does one that draws after each of them."""
        lengths = np.diff(step.query_starts)
        draws = np.diff(np.searchsorted(step.logit_rows, step.query_starts))
        decodes = (lengths == 1) | (draws == lengths)
        contexts = (step.context_lens * lengths)[decodes] - (lengths * (lengths - 1) // 2)[decodes]
        step_s = self._time_model.step_s(int(lengths[~decodes].sum()), int(lengths[decodes].sum()), int(contexts.sum()))
        self._device.start(self._clock(), step_s)

    def draw(self, rows: Sequence[DrawRow], reads: Sequence[ReadRow] = ()) -> Draws:
        """Sleep until the step ends, then one word a row. There is nothing to read."""
        assert not reads, "a simulated engine admits no request that reads rows"
        wait_s = self._device.wait_s(self._clock())
        if wait_s:
            self._sleep(wait_s)
            _late_s.record(max(0.0, self._clock() - self._device.busy_until_s))
        tokens: list[int | None] = []
        logprobs: list[PositionLogprob | None] = []
        for row in rows:
            token, wanted = self._word(row), row.sampling.num_logprobs
            tokens.append(token)
            logprobs.append(None if wanted is None else PositionLogprob(0.0, [(token, 0.0)] if wanted else []))
        return Draws(tokens, logprobs)

    def _word(self, row: DrawRow) -> int:
        packed = _DRAW.pack(row.sampling.seed, row.choice, row.position)
        return self._words[int.from_bytes(blake2b(packed, digest_size=4).digest(), "little") % len(self._words)]
