"""What workers say of their links to holders, and how much is being pulled from each holder. Pure.

Of each pair (worker, holder) the worker's own figures, as it last reported them; nothing of a pair that it has not
used of late. A holder's queue is what all workers say they are pulling from it, and what this router has granted and
no report shows yet. Memory is bounded by what the reports hold: 16 holders of each worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from services.common.links import FAR, NEAR, SSD, WORTH_TRYING
from services.router.domain import HolderLinks, MeasuredLink
from services.router.policies.view import FloatArray, IntArray, LinkArrays

BoolMatrix = np.ndarray[tuple[int, int], np.dtype[np.bool_]]
# Of memory and of SSD: bytes/s, setup in seconds, freshness; these, which fade to what is assumed, where unmeasured.
_UNMEASURED = (0.0, np.inf, 0.0)
_NOTHING = np.array([*_UNMEASURED, *_UNMEASURED])


@dataclass(slots=True)
class _Holder:
    """links: one line for each worker row; used: rows that have reported it."""

    links: FloatArray
    used: set[int]


class LinkTable:
    """Rows are those of the worker table; holders go by their location's name and epoch."""

    def __init__(self) -> None:
        self._holders: dict[str, _Holder] = {}
        self._reported: dict[int, tuple[HolderLinks, ...]] = {}
        self._queue_bytes: dict[str, float] = {}

    @property
    def num_holders(self) -> int:
        """Holders of which any figure is kept."""
        return len(self._holders)

    def report(self, row: int, holders: tuple[HolderLinks, ...]) -> None:
        """The worker in `row` has reported; what it does not name any more is forgotten."""
        before = self._reported.get(row, ())
        if holders == before:
            return
        self.release((one.holder, one.in_flight_bytes) for one in before)
        named = {one.holder for one in holders}
        for gone in (one.holder for one in before if one.holder not in named):
            self._forget(row, gone)
        for one in holders:
            holder = self._holders.setdefault(one.holder, _Holder(np.empty((0, len(_NOTHING))), set()))
            holder.used.add(row)
            _lines(holder, row + 1)[row] = (*_figures(one.memory), *_figures(one.ssd))
        self._reported[row] = holders
        self.add((one.holder, one.in_flight_bytes) for one in holders)

    def forget(self, row: int) -> None:
        """The worker in `row` has gone."""
        self.report(row, ())
        self._reported.pop(row, None)

    def add(self, pulls: Iterable[tuple[str, float]]) -> None:
        """Count bytes that are to be pulled."""
        for holder, num_bytes in pulls:
            if num_bytes:
                self._queue_bytes[holder] = self._queue_bytes.get(holder, 0.0) + num_bytes

    def release(self, pulls: Iterable[tuple[str, float]]) -> None:
        """Undo `add`."""
        for holder, num_bytes in pulls:
            left = self._queue_bytes.get(holder, 0.0) - num_bytes
            if left > 0.5:
                self._queue_bytes[holder] = left
            else:
                self._queue_bytes.pop(holder, None)

    def queue_bytes(self, holders: Sequence[str]) -> FloatArray:
        """What is being pulled from each of `holders`, or is about to."""
        return np.array([self._queue_bytes.get(holder, 0.0) for holder in holders], np.float64)

    def links(
        self, rows: IntArray, holders: Sequence[str], same_host: BoolMatrix, compute_bytes_per_s: FloatArray
    ) -> LinkArrays:
        """Links of the workers in `rows` to `holders`.

        What is assumed goes by same_host, [holder, worker], and by what each worker would compute.
        """
        least = WORTH_TRYING * compute_bytes_per_s
        near_rate = np.maximum(np.where(same_host, NEAR.bytes_per_s, FAR.bytes_per_s), least)
        near_setup_s = np.where(same_host, NEAR.setup_s, FAR.setup_s)
        ssd_rate = np.minimum(near_rate, np.maximum(SSD.bytes_per_s, least))
        assumed = LinkArrays(near_rate, near_setup_s, ssd_rate, np.full(near_rate.shape, SSD.setup_s))
        known = [(place, self._holders[one]) for place, one in enumerate(holders) if one in self._holders]
        if known:
            self._put_measured(assumed, rows, known, same_host, np.maximum(SSD.bytes_per_s, least))
        return assumed

    def _put_measured(
        self,
        links: LinkArrays,
        rows: IntArray,
        known: list[tuple[int, _Holder]],
        same_host: BoolMatrix,
        ssd_assumed: FloatArray,
    ) -> None:
        """Instead of what is assumed, of the workers that have measured any of the holders.

        known: by place. ssd_assumed: bytes/s, for each worker.
        """
        num_rows = int(rows.max(initial=-1)) + 1
        used = np.zeros(num_rows, np.bool_)
        used[[row for _, holder in known for row in holder.used if row < num_rows]] = True
        at = used[rows].nonzero()[0]
        if not len(at):
            return
        rows, same_host = rows[at], same_host[:, at]
        near_rate, near_setup_s = links.bytes_per_s[:, at], links.setup_s[:, at]
        # The figures come first, so that each is one contiguous array.
        measured = np.empty((len(_NOTHING), *near_rate.shape))
        measured[:] = _NOTHING[:, None, None]
        for place, holder in known:
            measured[:, place] = _lines(holder, num_rows)[rows].T
        rate, setup_s, freshness, ssd_rate, ssd_setup_s, ssd_freshness = measured
        # A holder that was never tried is taken to be as good as the best of its kind, or it never would be.
        untried = freshness == 0
        near_rate = np.where(untried, np.maximum(near_rate, _best(rate, untried, same_host)), near_rate)
        near_setup_s = np.where(untried, np.minimum(near_setup_s, -_best(-setup_s, untried, same_host)), near_setup_s)
        ssd_near_rate = np.minimum(near_rate, ssd_assumed[at])
        links.bytes_per_s[:, at] = np.maximum(rate, rate**freshness * near_rate ** (1.0 - freshness))
        links.setup_s[:, at] = np.minimum(setup_s, setup_s**freshness * near_setup_s ** (1.0 - freshness))
        links.ssd_bytes_per_s[:, at] = np.maximum(
            ssd_rate, ssd_rate**ssd_freshness * ssd_near_rate ** (1.0 - ssd_freshness)
        )
        links.ssd_setup_s[:, at] = np.minimum(
            ssd_setup_s, ssd_setup_s**ssd_freshness * SSD.setup_s ** (1.0 - ssd_freshness)
        )

    def _forget(self, row: int, name: str) -> None:
        holder = self._holders[name]
        holder.used.discard(row)
        holder.links[row] = _NOTHING
        if not holder.used:
            del self._holders[name]


def _best(values: FloatArray, untried: BoolMatrix, same_host: BoolMatrix) -> FloatArray:
    """For each pair, the worker's largest value among the tried holders on its host, or else among the others."""
    of_kind = [
        np.where(~untried & (same_host == near), values, -np.inf).max(axis=0, keepdims=True, initial=-np.inf)
        for near in (False, True)
    ]
    result: FloatArray = np.where(same_host, of_kind[1], of_kind[0])
    return result


def _figures(link: MeasuredLink | None) -> tuple[float, float, float]:
    return _UNMEASURED if link is None else (link.bytes_per_s, link.setup_s, link.freshness)


def _lines(holder: _Holder, num_rows: int) -> FloatArray:
    """Its links, `num_rows` of them or more."""
    if num_rows > len(holder.links):
        longer = np.tile(_NOTHING, (max(num_rows, 2 * len(holder.links)), 1))
        longer[: len(holder.links)] = holder.links
        holder.links = longer
    return holder.links
