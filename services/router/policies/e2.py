"""Exploit a long cached prefix, else explore: the rule of Preble.

Srivatsa et al., "Preble: Efficient Distributed Prompt Scheduling for LLM Serving" (2024), section 3.2. A request whose
cached part is longer than the rest goes to the cheapest of the workers that hold the longest prefix of it; any other
to the cheapest of all. A worker costs the work of the last three minutes, what must be evicted for the request, and
its prefill. Where the holders have had much more work than the least busy worker, a request goes there instead, and
takes its prefix along.
"""

from __future__ import annotations

import numpy as np

from services.router.policies.costs import Costs
from services.router.policies.view import FloatArray, PolicyRequest, PolicyView

# A holder that has had so many times the work of the least busy worker gets no more for its cache's sake.
IMBALANCE = 1.5


def e2(request: PolicyRequest, view: PolicyView, costs: Costs) -> FloatArray:
    """Seconds; workers that a request is not to go to cost infinitely more than any other."""
    load_s = view.pressure.window_s
    cost_s = load_s + costs.harm["eviction_harm_s"] + costs.prefill_s + costs.adapter_s
    held = int(view.local_blocks.max())
    if request.prompt_tokens - held * request.block_tokens >= held * request.block_tokens:
        return cost_s
    holders = view.local_blocks == held
    least = cost_s[holders].min()
    chosen = holders & (cost_s <= least)
    # What the request itself brings is no imbalance: in an idle mesh the first ones stay with their prefix.
    if load_s[chosen].min() > IMBALANCE * (load_s.min() + costs.work_s.max()):
        return load_s + 0.0
    result: FloatArray = np.where(holders, cost_s, cost_s.max() + 1.0 + cost_s)
    return result
