"""A policy that knows what no router can: the exact time at which each worker would draw the first token.

It stands in the place of `predicted_ttft`, scores alike but for that time, and is told of every worker's present state
and blocks before each decision. What is pulled is taken to come as planned. To compare with; it is greedy, so it bounds
nothing but what forecasts can give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from services.common.blocks import BlockId
from services.router.policies.costs import Costs
from services.router.policies.predicted_ttft import predicted_ttft
from services.router.policies.view import FloatArray, PolicyRequest, PolicyView
from services.router.simulator.job import Job
from services.router.simulator.worker import SimWorker

NAME = "oracle"


class Oracle:
    """Call `look` before each decision; `in_flight` is kept current by whoever sends requests to workers."""

    def __init__(self, workers: Sequence[SimWorker]) -> None:
        self.in_flight: list[list[Job]] = [[] for _ in workers]
        self.numbers: Mapping[int, int] = {}
        self._workers = workers
        self._ids: tuple[BlockId, ...] = ()
        self._now_s = 0.0

    def look(self, ids: tuple[BlockId, ...], now_s: float) -> None:
        """The next decision is about a prompt of these blocks."""
        self._ids, self._now_s = ids, now_s

    def score(self, request: PolicyRequest, view: PolicyView, costs: Costs) -> FloatArray:
        """Seconds. Exact where it matters: a candidate whose least possible time is above the best is not looked at."""
        rows = view.rows
        harm_s = predicted_ttft(request, view, costs) - costs.predicted_ttft_s
        # The prompts' own time, those ahead included.
        tokens = rows["queued_tokens"] + costs.prefill_tokens
        scores: FloatArray = harm_s + tokens * rows["prefill_token_s"]
        best_s = np.inf
        for at in np.argsort(scores, kind="stable").tolist():
            if scores[at] > best_s:
                break
            coming = int(costs.pull.end[at]) if costs.pull.seconds[at] > 0 else 0
            alone_s = costs.pull.seconds[at] + costs.prefill_s[at] if coming else 0.0
            exact_s = self._exact_s(request, int(rows["name_hash"][at]), coming)
            scores[at] = harm_s[at] + max(exact_s, alone_s)
            best_s = min(best_s, scores[at])
        return scores

    def _exact_s(self, request: PolicyRequest, name_hash: int, coming: int) -> float:
        number = self.numbers[name_hash]
        job = Job(key=None, prompt_tokens=request.prompt_tokens, output_tokens=1, block_ids=self._ids, coming=coming)
        return self._workers[number].first_token_s([*self.in_flight[number], job], self._now_s) - self._now_s
