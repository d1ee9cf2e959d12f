"""Move or recompute: what each candidate had best pull, from one holder or from two, one after the other.

    seconds of a run = queue at the holder + setup + bytes in memory / rate (+ SSD setup + bytes on the SSD / its rate)

All runs that could be useful, and all pairs of them, are scored at once for all candidates, against pulling nothing.
A pull is in the plan only where it makes the time to the end of prefill less, and no plan of so many runs is better.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.router.policies.engine_time import prefill_s
from services.router.policies.view import FloatArray, IntArray, PolicyRequest, PolicyView, Sources

NO_SOURCE = -1


@dataclass(slots=True)
class _Options:
    """Runs to choose from, by source and end, to the end of what the source holds or of what it has in memory."""

    source: IntArray
    end: IntArray


@dataclass(slots=True)
class PullPlans:
    """One element for each candidate, which computes its prompt after `end` blocks, once pulls have taken `seconds`.

    prefill_s: of computing that; alone_s: of computing all that follows the local blocks.
    """

    end: IntArray
    seconds: FloatArray
    prefill_s: FloatArray
    alone_s: FloatArray
    _local: IntArray
    _sources: Sources
    # Options by number, NO_SOURCE for none: of the only or first run, and of a second one.
    _first: IntArray
    _second: IntArray
    _options: _Options

    def runs(self, at: int) -> list[tuple[int, int, int]]:
        """What one candidate pulls: (source, first block, end), of sources by their numbers."""
        begin, found = int(self._local[at]), []
        for option in (int(self._first[at]), int(self._second[at])):
            if option != NO_SOURCE:
                end = int(self._options.end[option])
                found.append((int(self._options.source[option]), begin, end))
                begin = end
        return found

    def queue_s(self, at: slice | IntArray) -> FloatArray:
        """What of the seconds is waiting at holders."""
        first, second = self._first[at], self._second[at]
        # Whoever pulls at all has a first run.
        if not len(self._options.end) or (first == NO_SOURCE).all():
            return np.zeros(len(first))
        candidates = np.arange(len(self._first))[at]
        queue_s = self._sources.queue_bytes[:, None] / self._sources.links.bytes_per_s[:, candidates]
        total = np.zeros(len(first))
        for options in (first, second):
            waiting_s = queue_s[self._options.source[options], np.arange(len(first))]
            total += np.where(options == NO_SOURCE, 0.0, waiting_s)
        return total


def best_plans(request: PolicyRequest, view: PolicyView) -> PullPlans:
    """The best plan of each candidate."""
    rows, local = view.rows, view.local_blocks
    alone_s = prefill_s(request, rows, local)
    options = _options(view.sources, request.usable_blocks)
    count = len(options.end)
    if not count:
        none = np.full(len(rows), NO_SOURCE, np.int64)
        zero = np.zeros(len(rows), np.float64)
        return PullPlans(local, zero, alone_s, alone_s, local, view.sources, none, none, options)
    # A run that begins where another ends, of another source that has more.
    longer, other = options.end > options.end[:, None], options.source != options.source[:, None]
    first_of, second_of = np.nonzero(longer & other)
    # [option, candidate] after the local blocks, and [pair of options, candidate].
    one_s = _run_seconds(view, options, np.arange(count), local)
    rest_s = prefill_s(request, rows, options.end[:, None])
    total_s = [alone_s[None], one_s + rest_s]
    if len(first_of):
        two_s = one_s[first_of] + _run_seconds(view, options, second_of, options.end[first_of, None])
        total_s.append(two_s + rest_s[second_of])
    every_s = np.concatenate(total_s)
    best, candidates = every_s.argmin(axis=0), np.arange(len(rows))
    first = np.concatenate([[NO_SOURCE], np.arange(count), first_of])[best]
    second = np.concatenate([np.full(1 + count, NO_SOURCE), second_of])[best]
    last, pulls = np.where(second >= 0, second, first), best > 0
    left_s = np.where(pulls, rest_s[last, candidates], alone_s)
    return PullPlans(
        end=np.where(pulls, options.end[last], local),
        seconds=np.where(pulls, every_s[best, candidates] - left_s, 0.0),
        prefill_s=left_s,
        alone_s=alone_s,
        _local=local,
        _sources=view.sources,
        _first=first,
        _second=second,
        _options=options,
    )


def _options(sources: Sources, usable: int) -> _Options:
    """Of each source all that it has, and all that it has in memory where there is more on the SSD."""
    numbers = np.arange(len(sources.end))
    end, memory_end = np.minimum(sources.end, usable), np.minimum(sources.memory_end, usable)
    split = (memory_end > 0) & (memory_end < end)
    return _Options(np.concatenate([numbers, numbers[split]]), np.concatenate([end, memory_end[split]]))


def _run_seconds(view: PolicyView, options: _Options, which: IntArray, begin: IntArray) -> FloatArray:
    """[option of `which`, candidate]: time of its blocks from `begin` ([candidate] or [option, 1]) on; inf for none."""
    sources, source, last = view.sources, options.source[which], options.end[which, None]
    links, block_bytes = sources.links, view.rows["block_bytes"]
    memory_end = np.minimum(sources.memory_end[source, None], last)
    in_memory = np.maximum(0, memory_end - begin)
    seconds = (sources.queue_bytes[source, None] + in_memory * block_bytes) / links.bytes_per_s[source]
    seconds += links.setup_s[source]
    if (memory_end < last).any():
        on_ssd = np.maximum(0, last - np.maximum(begin, memory_end))
        ssd_s = links.ssd_setup_s[source] + on_ssd * block_bytes / links.ssd_bytes_per_s[source]
        seconds += np.where(on_ssd > 0, ssd_s, 0.0)
    result: FloatArray = np.where((last > begin) & ~sources.is_self[source], seconds, np.inf)
    return result
