"""Whether a canary may go on: what was measured of it beside what was measured of the version in service. Pure.

The vocabulary is that of progressive delivery (Argo Rollouts, Flagger): a canary gets a share of the traffic while an
analysis compares it with the stable version.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Smaller differences of times are those of the machine.
LEAST_DIFFERENCE_S = 0.005
# Means of fewer attempts say nothing of times.
LEAST_TIMED = 5


@dataclass(frozen=True, slots=True)
class Limits:
    """quality_nats: how much less likely reference texts may be, per token. latency_ratio: of times, canary to stable.

    error_rate: how much larger the part of the attempts that fail may be.
    """

    quality_nats: float
    latency_ratio: float
    error_rate: float


@dataclass(frozen=True, slots=True)
class Probed:
    """Answers of one worker to the fixed probes.

    logprobs: of the tokens of the reference texts, natural. answers: greedy ones, as token ids. Times in seconds:
    medians over the answers of the first token, and of each further one.
    """

    logprobs: Sequence[float]
    answers: Sequence[Sequence[int]]
    ttft_s: float
    tpot_s: float

    @property
    def quality(self) -> float:
        """Mean log probability of a reference token; NaN where one is not a number or there is none."""
        return math.fsum(self.logprobs) / len(self.logprobs) if self.logprobs else math.nan

    @property
    def degenerate(self) -> int:
        """Answers that are empty or repeat one token throughout."""
        return sum(len(answer) == 0 or (len(answer) > 1 and len(set(answer)) == 1) for answer in self.answers)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What became of the attempts of a version: those that ended well, those that its workers failed, mean times."""

    completed: int = 0
    failed: int = 0
    timed: int = 0
    ttft_s: float = 0.0
    tpot_s: float = 0.0

    @property
    def attempts(self) -> int:
        """Those that say anything of the version."""
        return self.completed + self.failed

    @property
    def error_rate(self) -> float:
        """Part of the attempts that failed."""
        return self.failed / self.attempts if self.attempts else 0.0


def probe_failure(stable: Probed, canary: Probed, limits: Limits) -> str:
    """Why the probes fail, in one line; empty when they pass."""
    if not all(map(math.isfinite, canary.logprobs)):
        return "quality: log probabilities that are no numbers"
    lost = stable.quality - canary.quality
    if not lost <= limits.quality_nats:
        means = f"{canary.quality:.3f} nats a token, {stable.quality:.3f} of the stable version"
        return f"quality: reference texts have {means}; {limits.quality_nats:g} less are allowed"
    if canary.degenerate > stable.degenerate:
        counts = f"{canary.degenerate} of {len(canary.answers)}, {stable.degenerate} of the stable version"
        return f"quality: answers that are empty or repeat one token: {counts}"
    return _latency_failure(stable.ttft_s, canary.ttft_s, stable.tpot_s, canary.tpot_s, limits)


def traffic_failure(stable: Traffic, canary: Traffic, limits: Limits) -> str:
    """Why the share of the traffic fails, in one line; empty while it does not."""
    if canary.error_rate > stable.error_rate + limits.error_rate:
        counts = f"{canary.failed} of {canary.attempts} attempts, {stable.failed} of {stable.attempts} of the stable"
        return f"errors: its workers failed {counts} version"
    if min(stable.timed, canary.timed) < LEAST_TIMED:
        return ""
    return _latency_failure(stable.ttft_s, canary.ttft_s, stable.tpot_s, canary.tpot_s, limits)


def _latency_failure(
    stable_ttft_s: float, canary_ttft_s: float, stable_tpot_s: float, canary_tpot_s: float, limits: Limits
) -> str:
    for name, stable_s, canary_s in (
        ("TTFT", stable_ttft_s, canary_ttft_s),
        ("TPOT", stable_tpot_s, canary_tpot_s),
    ):
        if canary_s > max(stable_s * limits.latency_ratio, stable_s + LEAST_DIFFERENCE_S):
            times = f"{canary_s * 1e3:.1f} ms, {stable_s * 1e3:.1f} ms of the stable version"
            return f"latency: {name} is {times}; {limits.latency_ratio:g} times that is allowed"
    return ""
