"""What a run amounts to, in the figures that serving is judged by. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from services.router.simulator.scenario import Outcome, Scenario
from services.router.simulator.trace import Trace, ideal_hit_tokens
from services.router.simulator.worker import SimWorker


@dataclass(frozen=True, slots=True)
class Summary:
    """One run.

    goodput_share: requests within both objectives, of all that arrived; refused ones are misses. goodput_rps: those
    per second of the time in which requests arrived. Percentiles are nearest-rank, over requests that were served.
    hit_rate: prompt tokens of served requests that were cached where they ran; hit_rate_of_ideal: as a share of what
    one infinite cache for all would have had. pulled_share: prompt tokens of them that were pulled from others.
    load_imbalance: the busiest worker's busy time over the mean. ttft_error, tpot_error: medians of
    |predicted - actual| / actual.
    """

    policy: str
    workers: int
    requests: int
    served: int
    refused: int
    duration_s: float
    offered_rps: float
    goodput_rps: float
    goodput_share: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    hit_rate: float
    hit_rate_of_ideal: float
    pulled_share: float
    load_imbalance: float
    utilisation: float
    preemptions: int
    attempts_per_request: float
    ttft_error: float
    tpot_error: float

    def as_json(self) -> dict[str, str | int | float]:
        """For one JSON object."""
        return asdict(self)

    def figures(self) -> dict[str, float]:
        """What is a number."""
        return {name: value for name, value in asdict(self).items() if not isinstance(value, str)}


def summarise(scenario: Scenario, trace: Trace, outcomes: Sequence[Outcome], workers: Sequence[SimWorker]) -> Summary:
    """The figures of one run."""
    served = [outcome for outcome in outcomes if outcome.ended_s >= 0]
    good = sum(
        outcome.ttft_s <= scenario.ttft_objective_s and outcome.tpot_s <= scenario.tpot_objective_s
        for outcome in served
    )
    arrivals = [outcome.arrived_s for outcome in outcomes]
    arriving_s = max(arrivals, default=0.0) - min(arrivals, default=0.0)
    ended_s = max((outcome.ended_s for outcome in served), default=0.0)
    duration_s = max(arriving_s, 1e-9)
    prompt_tokens = sum(outcome.request.prompt_tokens for outcome in served)
    cached_tokens = sum(outcome.cached_tokens for outcome in served)
    ideal = _ideal_tokens(served, trace.block_tokens)
    ttfts = sorted(outcome.ttft_s for outcome in served)
    tpots = sorted(outcome.tpot_s for outcome in served if outcome.request.output_tokens > 1)
    busy = [worker.busy_s for worker in workers]
    ttft_errors = _errors((outcome.predicted_ttft_s, outcome.ttft_s) for outcome in served)
    tpot_errors = _errors((outcome.predicted_tpot_s, outcome.tpot_s) for outcome in served)
    return Summary(
        policy=scenario.policy,
        workers=scenario.num_workers,
        requests=len(outcomes),
        served=len(served),
        refused=sum(outcome.refused for outcome in outcomes),
        duration_s=max(ended_s, arriving_s),
        offered_rps=len(outcomes) / duration_s,
        goodput_rps=good / duration_s,
        goodput_share=good / max(1, len(outcomes)),
        ttft_mean_s=sum(ttfts) / max(1, len(ttfts)),
        ttft_p50_s=_percentile(ttfts, 0.5),
        ttft_p99_s=_percentile(ttfts, 0.99),
        tpot_p50_s=_percentile(tpots, 0.5),
        tpot_p99_s=_percentile(tpots, 0.99),
        hit_rate=cached_tokens / max(1, prompt_tokens),
        hit_rate_of_ideal=cached_tokens / ideal if ideal else 1.0,
        pulled_share=sum(outcome.pulled_tokens for outcome in served) / max(1, prompt_tokens),
        load_imbalance=max(busy) * len(busy) / sum(busy) if sum(busy) else 1.0,
        utilisation=sum(busy) / len(busy) / max(ended_s, arriving_s, 1e-9),
        preemptions=sum(worker.preemptions for worker in workers),
        attempts_per_request=sum(outcome.attempts for outcome in outcomes) / max(1, len(outcomes)),
        ttft_error=_percentile(ttft_errors, 0.5),
        tpot_error=_percentile(tpot_errors, 0.5),
    )


def _ideal_tokens(served: Sequence[Outcome], block_tokens: int) -> int:
    ordered = sorted(served, key=lambda outcome: outcome.arrived_s)
    return sum(ideal_hit_tokens((outcome.request for outcome in ordered), block_tokens))


def _errors(times: Iterable[tuple[float, float]]) -> list[float]:
    """Relative errors of (predicted, actual), where there is an actual time."""
    return sorted(abs(predicted_s - actual_s) / actual_s for predicted_s, actual_s in times if actual_s > 0)


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
