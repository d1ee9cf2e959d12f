"""Who takes requests at a moment, worked out once and kept for as long as nothing about it changes. Pure.

Workers come, go, drain and fall silent seldom; requests come all the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from services.router.policies.view import IntArray, WorkerRows
from services.router.worker_rows import Selection

# A worker whose reports or whose steps (while it has work) stand still for this long is suspect.
SUSPECT_S = 1.0
# Times are added up in another order than where they are compared.
_ROUNDING_S = 1e-6
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ModelWorkers:
    """The workers of one model that take requests; whatever fits the least of them fits all."""

    selection: Selection
    least_context: int
    least_block_tokens: int
    least_blocks: int


@dataclass(slots=True)
class Present:
    """serving: of each row, whether its worker takes requests. givers: rows that others may pull from.

    suspects: rows without life signs. It holds from since_s until until_s, by the clock of life signs.
    """

    serving: BoolArray
    givers: IntArray
    suspects: frozenset[int]
    since_s: float
    until_s: float
    _by_model: dict[tuple[int, bool], ModelWorkers] = field(default_factory=dict)

    def of_model(self, model: int, rows: WorkerRows, *, whole: bool = True) -> ModelWorkers:
        """Those of a model that do all of a request, or those that do not; rows: as they were when this was made."""
        found = self._by_model.get((model, whole))
        if found is None:
            able = self.serving & (rows["model"] == model) & (model >= 0) & (rows["runs_whole"] == whole)
            found = self._by_model[model, whole] = _workers_of(np.flatnonzero(able), rows)
        return found


class RollCall:
    """Keeps the present state; whoever changes rows says so."""

    def __init__(self) -> None:
        self._present: Present | None = None

    def changed(self) -> None:
        """Who is there has changed, or who of them takes requests."""
        self._present = None

    def heard(self, row: int, *, suspect_at_s: float = math.inf) -> None:
        """A worker gave a life sign, and will be suspect from a time on unless it gives another."""
        present = self._present
        if present is None:
            return
        if row in present.suspects:
            self._present = None
        elif suspect_at_s < present.until_s:
            present.until_s = suspect_at_s

    def present(self, rows: WorkerRows, heard_s: float) -> Present:
        """heard_s: now, less what life signs may be late by."""
        present = self._present
        if present is None or not present.since_s <= heard_s < present.until_s - _ROUNDING_S:
            present = self._present = _present(rows, heard_s)
        return present


def suspect(rows: WorkerRows, heard_s: float) -> BoolArray:
    """Of each row, whether its worker gets no new work for want of life signs."""
    result: BoolArray = ~rows["up"] | (heard_s - rows["reported_s"] > SUSPECT_S) | _stalled(rows, heard_s)
    return result


def serving(rows: WorkerRows, suspects: BoolArray) -> BoolArray:
    """Of each row, whether its worker takes new requests."""
    result: BoolArray = rows["live"] & rows["ready"] & ~rows["draining"] & ~rows["drained"] & ~suspects
    return result


def _stalled(rows: WorkerRows, heard_s: float) -> BoolArray:
    result: BoolArray = _has_work(rows) & (heard_s - rows["moved_s"] > rows["stall_limit_s"])
    return result


def _has_work(rows: WorkerRows) -> BoolArray:
    result: BoolArray = rows["running"] + rows["waiting"] > 0
    return result


def _present(rows: WorkerRows, heard_s: float) -> Present:
    suspects = suspect(rows, heard_s)
    there = rows["live"] & ~suspects
    silent_at_s = rows["reported_s"] + SUSPECT_S
    stalls_at_s = np.where(_has_work(rows), rows["moved_s"] + rows["stall_limit_s"], np.inf)
    return Present(
        serving=serving(rows, suspects),
        givers=np.flatnonzero(there & rows["serves_pulls"]),
        suspects=frozenset(np.flatnonzero(rows["live"] & suspects).tolist()),
        since_s=heard_s,
        until_s=float(np.minimum(silent_at_s, stalls_at_s)[there].min(initial=np.inf)),
    )


def _workers_of(found: IntArray, rows: WorkerRows) -> ModelWorkers:
    least = (int(rows[name][found].min(initial=2**62)) for name in ("context_length", "block_tokens", "total_blocks"))
    return ModelWorkers(Selection.of(found), *least)
