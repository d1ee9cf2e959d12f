"""Consistent hashing of the prompt's first blocks with bounded loads; needs no index.

The bound is that of Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2018), with
highest-random-weight hashing for the ring: a key goes to the worker it prefers most among those below
(1 + EPSILON) times the mean load.
"""

from __future__ import annotations

import numpy as np

from services.router.policies.costs import Costs
from services.router.policies.view import FloatArray, PolicyRequest, PolicyView, rendezvous

EPSILON = 0.25


def prefix_hash(request: PolicyRequest, view: PolicyView, costs: Costs) -> FloatArray:
    """Lower is preferred; workers at their bound come after all others."""
    rows = view.rows
    load = rows["running"] + rows["waiting"] + rows["pending"]
    bound = np.ceil((1.0 + EPSILON) * (load.sum() + 1.0) / len(rows))
    result: FloatArray = (load >= bound) + 1.0 - rendezvous(rows["name_hash"], request.prefix_key)
    return result
