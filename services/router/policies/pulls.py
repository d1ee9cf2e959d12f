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


@dataclass(frozen=True, slots=True)
class PullPlans:
    """One element for each candidate.

    Blocks [local, first_end) come from first_source and [first_end, end) from second_source, indices into the
    sources, NO_SOURCE for none. prefill_s: computing the prompt after `end`; alone_s: after the local blocks.
    """

    first_source: IntArray
    first_end: IntArray
    second_source: IntArray
    end: IntArray
    seconds: FloatArray
    queue_s: FloatArray
    prefill_s: FloatArray
    alone_s: FloatArray


@dataclass(frozen=True, slots=True)
class _Options:
    """Runs to choose from, by source and end, to the end of what the source holds or of what it has in memory."""

    source: IntArray
    end: IntArray


def best_plans(request: PolicyRequest, view: PolicyView) -> PullPlans:
    """The best plan of each candidate."""
    rows, local = view.rows, view.local_blocks
    candidates = np.arange(len(rows))
    alone_s = prefill_s(request, rows, local[:, None])[:, 0]
    if not len(view.sources.end):
        none = np.full(len(rows), NO_SOURCE, np.int64)
        zero = np.zeros(len(rows), np.float64)
        return PullPlans(none, local, none, local, zero, zero, alone_s, alone_s)
    options = _options(view.sources, request.usable_blocks)
    count = len(options.end)
    # A run that begins where another ends, of another source that has more.
    first_of, second_of = np.nonzero((options.end > options.end[:, None]) & (options.source != options.source[:, None]))
    # [candidate, option] after the local blocks, and [candidate, pair of options].
    one_s = _run_seconds(view, options, np.arange(count), local[:, None])
    rest_s = prefill_s(request, rows, options.end[None])
    two_s = one_s[:, first_of] + _run_seconds(view, options, second_of, options.end[None, first_of])
    total_s = np.concatenate([alone_s[:, None], one_s + rest_s, two_s + rest_s[:, second_of]], axis=1)
    best = total_s.argmin(axis=1)
    first = np.concatenate([[NO_SOURCE], np.arange(count), first_of])[best]
    second = np.concatenate([np.full(1 + count, NO_SOURCE), second_of])[best]
    last = np.where(second >= 0, second, first)
    end = np.where(best > 0, options.end[last], local)
    left_s = np.where(best > 0, rest_s[candidates, last], alone_s)
    queue_s = np.append(view.sources.queue_bytes / view.sources.links.bytes_per_s, np.zeros((len(rows), 1)), axis=1)
    sources = np.append(options.source, NO_SOURCE)
    return PullPlans(
        first_source=sources[first],
        first_end=np.where(best > 0, options.end[first], local),
        second_source=sources[second],
        end=end,
        seconds=np.where(best > 0, total_s[candidates, best] - left_s, 0.0),
        queue_s=queue_s[candidates, sources[first]] + queue_s[candidates, sources[second]],
        prefill_s=left_s,
        alone_s=alone_s,
    )


def _options(sources: Sources, usable: int) -> _Options:
    """Of each source all that it has, and all that it has in memory where there is more on the SSD."""
    numbers = np.arange(len(sources.end))
    end, memory_end = np.minimum(sources.end, usable), np.minimum(sources.memory_end, usable)
    split = (memory_end > 0) & (memory_end < end)
    return _Options(np.concatenate([numbers, numbers[split]]), np.concatenate([end, memory_end[split]]))


def _run_seconds(view: PolicyView, options: _Options, which: IntArray, begin: IntArray) -> FloatArray:
    """[candidate, option of `which`]: time of its blocks from `begin` ([candidate or 1, option]) on; inf for none."""
    sources, source, last = view.sources, options.source[which], options.end[which]
    links, block_bytes = sources.links, view.rows["block_bytes"][:, None]
    memory_end = np.minimum(sources.memory_end[source], last)
    in_memory = np.maximum(0, memory_end - begin)
    seconds = (sources.queue_bytes[source] + in_memory * block_bytes) / links.bytes_per_s[:, source]
    seconds = seconds + links.setup_s[:, source]
    on_ssd = np.maximum(0, last - np.maximum(begin, memory_end))
    if on_ssd.any():
        ssd_s = links.ssd_setup_s[:, source] + on_ssd * block_bytes / links.ssd_bytes_per_s[:, source]
        seconds = seconds + np.where(on_ssd > 0, ssd_s, 0.0)
    result: FloatArray = np.where((last > begin) & ~sources.is_self[:, source], seconds, np.inf)
    return result
