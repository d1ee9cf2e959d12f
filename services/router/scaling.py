"""How many replicas the load of a pool asks for, from queues and forecasts. Pure; time comes in as an argument.

    needed = work that arrives / utilisation + backlog / drain_s

in workers: work is in seconds of one worker, measured at a full batch. The backlog is what workers have not computed
and what waits in gateways. The need must last for `confirm_s` before more replicas are wanted, and a lower one for
`keep_s` before fewer are: a burst that is gone by the time a replica would be there buys none, and a lull sheds none.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from services.common.decaying_sum import DecayingSum
from services.router.policies.view import FloatArray, WorkerRows

_RATE_S = 30.0
_ATTAINMENT_S = 60.0
# A rate seen for less than this is no rate.
_LEAST_SEEN_S = 5.0
# A need above a whole number of replicas by less than this is met by that number.
_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class ScalingConfig:
    """utilisation: share of its time that a worker is to work. drain_s: in which a backlog is to be gone.

    ttft_s: what attainment is counted against where a request brings no objective. idle_s: a pool that nobody has used
    for so long wants no replica; 0: always one at least.
    """

    utilisation: float = 0.8
    drain_s: float = 10.0
    confirm_s: float = 5.0
    keep_s: float = 120.0
    ttft_s: float = 2.0
    idle_s: float = 0.0


@dataclass(slots=True)
class Demand:
    """What has been asked of one pool lately."""

    work: DecayingSum = field(default_factory=lambda: DecayingSum(_RATE_S, _LEAST_SEEN_S))
    met: DecayingSum = field(default_factory=lambda: DecayingSum(_ATTAINMENT_S))
    judged: DecayingSum = field(default_factory=lambda: DecayingSum(_ATTAINMENT_S))

    def add_work(self, seconds: float, now_s: float) -> None:
        """Work has been granted, or refused for good."""
        self.work.add(seconds, now_s)

    def judge(self, in_time: bool, now_s: float) -> None:
        """A request is predicted to get its first token in time, or not."""
        self.judged.add(1.0, now_s)
        self.met.add(float(in_time), now_s)

    def attainment(self, now_s: float) -> float:
        """Share of requests that are predicted to be in time; 1 when there are none."""
        judged = self.judged.at(now_s)
        return self.met.at(now_s) / judged if judged > 1e-6 else 1.0


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits for the workers of a pool, in all. waiting_requests: of them those still in gateways."""

    queue_tokens: float
    waiting_requests: int
    seconds: float


def work_s(rows: WorkerRows, prefill_tokens: float, output_tokens: float) -> FloatArray:
    """Seconds of each worker that a request takes; a decoded token takes its share of a step of a full batch."""
    full_step_s = rows["benchmark_decode_step_s"] + rows["decode_slope_s"] * (rows["max_running"] - 1)
    result: FloatArray = (
        prefill_tokens / rows["prefill_tokens_per_s"] + output_tokens * full_step_s / rows["max_running"]
    )
    return result


def backlog(rows: WorkerRows, *, waiting_requests: int, waiting_tokens: float, output_tokens: float) -> Backlog:
    """Of a pool with the workers `rows`. waiting_tokens: to be computed of the prompts that wait in gateways."""
    queued = rows["queued_tokens"] + rows["pending_tokens"]
    at_workers_s = float((queued / rows["prefill_tokens_per_s"]).sum()) if len(rows) else 0.0
    in_gateways_s = 0.0
    if len(rows) and waiting_requests:
        each_s = work_s(rows, waiting_tokens / waiting_requests, output_tokens)
        in_gateways_s = float(each_s.mean()) * waiting_requests
    return Backlog(float(queued.sum()) + waiting_tokens, waiting_requests, at_workers_s + in_gateways_s)


def needed_replicas(arriving: float, waiting_s: float, config: ScalingConfig) -> int:
    """At least 1. arriving: seconds of work per second; waiting_s: seconds of work."""
    needed = arriving / config.utilisation + waiting_s / config.drain_s
    return max(1, math.ceil(needed - _TOLERANCE))


class DesiredReplicas:
    """One pool's wish, changed with hysteresis."""

    def __init__(self, config: ScalingConfig) -> None:
        self._config = config
        self._needs: deque[tuple[float, int]] = deque()
        self._confirmed: deque[tuple[float, int]] = deque()

    def update(self, needed: int, replicas: int, now_s: float) -> int:
        """Call about every second. replicas: those there are, which is what was wanted before this router began."""
        if not self._confirmed:
            self._confirmed.append((now_s, max(1, replicas)))
            self._needs.append((now_s, max(1, replicas)))
        self._needs.append((now_s, needed))
        _forget(self._needs, now_s - self._config.confirm_s)
        self._confirmed.append((now_s, min(need for _, need in self._needs)))
        _forget(self._confirmed, now_s - self._config.keep_s)
        return max(count for _, count in self._confirmed)


def _forget(history: deque[tuple[float, int]], before_s: float) -> None:
    while history[0][0] < before_s:
        history.popleft()
