"""Whether a request is taken at all, before anybody computes anything for it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from services.router.domain import Ask, RefusalReason, Refused
from services.router.policies.costs import Costs

RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """max_queue_s: a request that would wait longer than this on every worker is refused."""

    max_queue_s: float


def refuse(ask: Ask, costs: Costs, config: AdmissionConfig) -> Refused | None:
    """Why no candidate may have the request; None when one may."""
    wait_s = float(costs.queue_s.min())
    if wait_s > config.max_queue_s:
        return Refused(RefusalReason.OVERLOADED, "every worker is full", max(RETRY_S, wait_s / 2))
    fastest_s = float(costs.predicted_ttft_s.min())
    if 0 < ask.deadline_s < fastest_s:
        detail = f"the first token is {fastest_s:.1f} s away, the deadline {ask.deadline_s:.1f} s"
        return Refused(RefusalReason.DEADLINE, detail, max(RETRY_S, fastest_s - ask.deadline_s))
    return None
