"""Tells the router what waits here, for its forecasts and its advice to autoscalers; silent while nobody waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kvmesh.v1.router_pb2 import QueueReport, WaitingRequests

from services.gateway.cold_starts import ColdStarts
from services.gateway.fair_line import FairLine

_CHANGED_EVERY_S = 0.1
_UNCHANGED_EVERY_S = 1.0


class QueueReporter:
    """`run` until cancelled."""

    def __init__(self, line: FairLine, cold: ColdStarts, tell: Callable[[QueueReport], None]) -> None:
        self._line = line
        self._cold = cold
        self._tell = tell

    async def run(self) -> None:
        """Report while anybody waits, and once when nobody does any more."""
        while True:
            await self._line.somebody_waits.wait()
            await self._report()

    async def _report(self) -> None:
        told, told_at_s = QueueReport(), float("-inf")
        while True:
            report, now_s = self._queues(), time.monotonic()
            if report != told or (report.waiting and now_s - told_at_s >= _UNCHANGED_EVERY_S):
                self._tell(report)
                told, told_at_s = report, now_s
            if not report.waiting:
                self._line.somebody_waits.clear()
                return
            await asyncio.sleep(_CHANGED_EVERY_S)

    def _queues(self) -> QueueReport:
        waiting = self._line.waiting_by_model()
        for model, requests in self._cold.waiting().items():
            # Their tokens are not counted before there is a model.
            before, prompt_tokens = waiting.get(model, (0, 0))
            waiting[model] = before + requests, prompt_tokens
        return QueueReport(
            waiting=[
                WaitingRequests(model=model, requests=requests, prompt_tokens=prompt_tokens)
                for model, (requests, prompt_tokens) in waiting.items()
            ]
        )
