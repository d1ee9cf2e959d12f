"""The default: the least predicted time to first token, plus the harm done to others."""

from __future__ import annotations

from services.router.policies.costs import Costs
from services.router.policies.view import FloatArray, PolicyRequest, PolicyView


def predicted_ttft(request: PolicyRequest, view: PolicyView, costs: Costs) -> FloatArray:
    """Seconds; see `costs`."""
    return costs.predicted_ttft_s + costs.harm_s
