"""Policies that look at no prefix: for comparison."""

from __future__ import annotations

import numpy as np

from services.router.policies.costs import Costs
from services.router.policies.view import FloatArray, PolicyRequest, PolicyView


def least_loaded(request: PolicyRequest, view: PolicyView, costs: Costs) -> FloatArray:
    """Requests there, those just granted included; among equals the shorter queue of tokens."""
    rows = view.rows
    requests = rows["running"] + rows["waiting"] + rows["pending"]
    tokens = rows["queued_tokens"] + rows["pending_tokens"]
    return np.asarray(requests + tokens / (tokens.max() + 1.0), np.float64)


def round_robin(request: PolicyRequest, view: PolicyView, costs: Costs) -> FloatArray:
    """One after another, in the order of their names' hashes."""
    count = len(view.rows)
    order = np.argsort(view.rows["name_hash"], kind="stable")
    turn = np.empty(count, np.float64)
    turn[order] = (np.arange(count) - request.sequence) % count
    return turn
