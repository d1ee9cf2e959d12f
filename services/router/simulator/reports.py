"""The periodic reports of simulated workers, each in its own phase; an idle worker's last one says so. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from services.router.simulator.events import Events
from services.router.simulator.mesh_view import REPORT_EVERY_S, MeshView
from services.router.simulator.worker import SimWorker


class PeriodicReports:
    """Of all workers, by number."""

    def __init__(
        self, view: MeshView, workers: Sequence[SimWorker], alive: Sequence[bool], events: Events, random: Random
    ) -> None:
        """alive: by worker, kept up to date by its owner; the dead say nothing."""
        self._view = view
        self._workers = workers
        self._alive = alive
        self._events = events
        self._phases = [random.random() * REPORT_EVERY_S for _ in workers]
        self._reporting = [False] * len(workers)

    def ensure(self, number: int) -> None:
        """A worker that has something to do reports from now on."""
        if not self._reporting[number] and not self._workers[number].is_idle:
            self._reporting[number] = True
            self._plan(number)

    def _plan(self, number: int) -> None:
        phase_s = self._phases[number]
        turns = math.floor((self._events.now_s - phase_s) / REPORT_EVERY_S + 1e-9) + 1
        self._events.at(phase_s + turns * REPORT_EVERY_S, lambda: self._report(number))

    def _report(self, number: int) -> None:
        worker = self._workers[number]
        self._reporting[number] = self._alive[number] and not worker.is_idle
        if self._alive[number]:
            self._view.report(number, worker, self._events.now_s)
        if self._reporting[number]:
            self._plan(number)
