"""Placement policies: pure functions of (request, view) that score all candidates at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from services.router.policies.costs import Costs
from services.router.policies.e2 import e2
from services.router.policies.load import least_loaded, round_robin
from services.router.policies.predicted_ttft import predicted_ttft
from services.router.policies.prefix_hash import prefix_hash
from services.router.policies.view import FloatArray, PolicyRequest, PolicyView

# A policy's scores, one for each candidate; the lowest wins.
Policy = Callable[[PolicyRequest, PolicyView, Costs], FloatArray]

POLICIES: Mapping[str, Policy] = {
    "predicted_ttft": predicted_ttft,
    "e2": e2,
    "prefix_hash": prefix_hash,
    "least_loaded": least_loaded,
    "round_robin": round_robin,
}
