"""Whether a request is taken at all, before anybody computes anything for it, and which candidates may have it. Pure.

A worker that has nothing to do takes whatever it can finish in time, so that nothing latches. Any other is granted
requests while its queue is below the grant limit (a share of it for lower classes), or while waiting in its queue is
still faster than the best of those below their limit: a long cached prefix is worth a wait, and that bounds the queue
by the time the request would take elsewhere. When nobody is below, the answer is OVERLOADED and the request waits in
its gateway. Waiting shortens a queue by no more than it shortens what is left of the objectives, so a request that no
candidate would serve in time, queues included, is refused for good (DEADLINE). Work that was accepted before and goes
on elsewhere is refused for no objective; it waits for room like all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from services.common.fair_queue import RequestClass
from services.router.domain import Ask, RefusalReason, Refused
from services.router.policies.costs import Costs
from services.router.policies.view import FloatArray, WorkerRows

# Least time after which a refused caller is told to come back.
RETRY_S = 1.0
# A promise tighter than this many idle steps is kept by nobody else's help: it would be a worker of one's own.
_LEAST_PROMISE = 2.0
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """max_queue_s: the grant limit, work in a worker's queue.

    queue_shares, pace_shares, place_shares: of the limit, of the TPOT promised to those that a worker has, and of its
    places for running sequences, by PriorityClass, 1 where absent: lower classes leave room for higher ones.
    """

    max_queue_s: float = 0.2
    queue_shares: Mapping[int, float] = field(default_factory=lambda: {RequestClass.BATCH: 0.5})
    pace_shares: Mapping[int, float] = field(default_factory=lambda: {RequestClass.BATCH: 0.8})
    place_shares: Mapping[int, float] = field(default_factory=lambda: {RequestClass.BATCH: 0.5})


@dataclass(frozen=True, slots=True)
class Forecast:
    """What else the answer is made of.

    margin: by which times to the first token are to be multiplied to be kept by most requests, at least 1.
    backlog_s: time that all workers together need for what waits in gateways.
    """

    margin: float = 1.0
    backlog_s: float = 0.0


def admissible(
    ask: Ask, rows: WorkerRows, costs: Costs, config: AdmissionConfig, forecast: Forecast
) -> BoolArray | Refused:
    """The candidates that may have the request, at least one; or why none may."""
    idle = _is_idle(rows)
    keeps_pace = paced(ask, rows, costs, config)
    early = in_time(ask, rows, costs, forecast)
    if not early.any():
        return _too_late(costs, _time_left_s(ask), forecast)
    able = early & keeps_pace
    if ask.priority in config.place_shares and not ask.resumes:
        able &= idle | _has_place(ask, rows, config.place_shares[ask.priority])
    queue_limit_s = config.max_queue_s * config.queue_shares.get(ask.priority, 1.0)
    below = idle | (costs.queue_s <= queue_limit_s)
    if np.count_nonzero(below) == len(below):
        admitted = able
    else:
        # A worker with room bounds the queues of the others even where it is too late itself: what only the holder of
        # its prefix serves in time goes there, and does not keep those behind it from workers with nothing to do.
        has_room = keeps_pace & below
        elsewhere_s = costs.predicted_ttft_s[has_room].min() if has_room.any() else 0.0
        admitted = able & (below | (costs.predicted_ttft_s < elsewhere_s))
    return admitted if np.count_nonzero(admitted) else _full(costs, able, queue_limit_s, forecast)


def in_time(ask: Ask, rows: WorkerRows, costs: Costs, forecast: Forecast) -> BoolArray:
    """The candidates that would draw the first token within the request's objectives, their queues included."""
    limit_s = _time_left_s(ask)
    if limit_s == np.inf:
        return np.ones(len(costs.queue_s), np.bool_)
    result: BoolArray = _expected_ttft_s(rows, costs, _is_idle(rows), forecast.margin) <= limit_s
    return result


def paced(ask: Ask, rows: WorkerRows, costs: Costs, config: AdmissionConfig) -> BoolArray:
    """The candidates that would decode fast enough with the request, for it and for all that they have."""
    result: BoolArray = _keeps_pace(ask, rows, costs, config) | _is_idle(rows) | ask.resumes
    return result


def _is_idle(rows: WorkerRows) -> BoolArray:
    result: BoolArray = rows["running"] + rows["waiting"] + rows["pending"] + rows["queued_tokens"] == 0
    return result


def _has_place(ask: Ask, rows: WorkerRows, share: float) -> BoolArray:
    """Where the request leaves the rest of the places to others: who holds one holds it for a whole output."""
    taken = rows["running"] + rows["waiting"] + rows["pending"] + ask.num_choices
    result: BoolArray = taken <= share * rows["max_running"]
    return result


def _time_left_s(ask: Ask) -> float:
    """Until the first token must be there."""
    if ask.resumes:
        return np.inf
    return min((limit_s for limit_s in (ask.ttft_objective_s, ask.deadline_s) if limit_s > 0), default=np.inf)


def _expected_ttft_s(rows: WorkerRows, costs: Costs, idle: BoolArray, margin: float) -> FloatArray:
    """With the margin where there is a load to misjudge; what an idle worker once learned under load must not shut it
    out, so it is believed to be as fast as it was when it started.
    """
    alone_s = costs.prefill_tokens / rows["benchmark_prefill_tokens_per_s"]
    alone_s = np.minimum(costs.prefill_s, np.maximum(alone_s, rows["benchmark_decode_step_s"]))
    result: FloatArray = np.where(idle, costs.pull_s + alone_s, costs.predicted_ttft_s * margin)
    return result


def _keeps_pace(ask: Ask, rows: WorkerRows, costs: Costs, config: AdmissionConfig) -> BoolArray:
    """With the request, the worker decodes fast enough for it and for those that were promised a pace before."""
    own_s = ask.tpot_objective_s or np.inf
    promised_s = np.maximum(rows["promised_tpot_s"], _LEAST_PROMISE * rows["benchmark_decode_step_s"])
    promised_s = promised_s * config.pace_shares.get(ask.priority, 1.0)
    result: BoolArray = costs.predicted_tpot_s <= np.minimum(own_s, promised_s)
    return result


def _too_late(costs: Costs, limit_s: float, forecast: Forecast) -> Refused:
    fastest_s = float(costs.predicted_ttft_s.min())
    detail = f"the first token is {fastest_s:.1f} s away and was wanted within {limit_s:.1f} s"
    # By then what is admitted and waiting now has been computed, and a new request of its kind finds no queue.
    return Refused(RefusalReason.DEADLINE, detail, max(RETRY_S, float(costs.queue_s.min()) + forecast.backlog_s))


def _full(costs: Costs, able: BoolArray, queue_limit_s: float, forecast: Forecast) -> Refused:
    if not able.any():
        detail = "every worker is too slow, or has no place for the request's class, at its present load"
        return Refused(RefusalReason.OVERLOADED, detail, max(RETRY_S, forecast.backlog_s))
    queue_s = float(costs.queue_s[able].min())
    retry_after_s = max(RETRY_S, queue_s + forecast.backlog_s)
    return Refused(RefusalReason.OVERLOADED, "every worker is full", retry_after_s, queue_s - queue_limit_s)
