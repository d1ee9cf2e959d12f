"""What this worker's own pulls have taught about the links to its holders. Pure arithmetic; time is an argument.

For each holder, and apart for its memory and its SSD, a rate and a setup time (common/links.py), as running means of
logarithms: a surprise moves a figure by at most `_MOST` and twice as slow weighs as much as twice as fast. A pull that
was cut or failed counts in full, since waiting for it has cost more than any good one gains. Figures fade with a
half-life, so that a link that was slow once is tried again, by an ordinary pull, which the race makes cheap; the
half-life doubles, up to `_MOST_PATIENT` times, with every failure in a row, so that a bad link is tried ever less.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.common.links import NEAR, SSD, WORTH_TRYING, Link, faded
from services.worker.link_messages import HolderLinks, MeasuredLink, RunTiming
from services.worker.messages import HolderRun

MAX_HOLDERS = 16
_WEIGHT = 0.5
_MOST = 16.0
# What a holder that does not answer is taken to have cost: the time in which its death is noticed.
_FAILED_S = 1.0
_MOST_PATIENT = 8.0
_MIN_SETUP_S = 1e-4
# A run's rate counts in full when a quarter of its time or more lies after its first block.
_FULL_WEIGHT_RATIO = 4.0
# Fewer blocks from an SSD than this tell of its latency, more of its rate.
_FEW_BLOCKS = 8
# Of a run's time at least this share is its slower tier's, whatever the other was thought to take.
_LEAST_SHARE = 0.1


@dataclass(slots=True)
class _Measured:
    """failures: pulls in a row that were cut or failed."""

    link: Link
    measured_s: float
    failures: int = 0


@dataclass(slots=True)
class _Holder:
    memory: _Measured | None = None
    ssd: _Measured | None = None
    in_flight_bytes: int = 0


class LinkRates:
    """The holders that were pulled from last, MAX_HOLDERS of them."""

    def __init__(self, block_bytes: int, half_life_s: float = 30.0) -> None:
        self.block_bytes = block_bytes
        # Bytes of blocks that this worker would compute in a second; 0: not known.
        self.compute_bytes_per_s = 0.0
        self._half_life_s = half_life_s
        self._holders: OrderedDict[tuple[str, str, int], _Holder] = OrderedDict()

    def begin(self, runs: Sequence[HolderRun]) -> None:
        """A pull of `runs` is under way. What is waited for loads no link yet, and says nothing of it in the end."""
        for run in _present(runs):
            self._touch(run.holder).in_flight_bytes += run.num_blocks * self.block_bytes

    def end(self, runs: Sequence[HolderRun]) -> None:
        """The pull of `runs` that was begun is over."""
        for run in _present(runs):
            holder = self._holders.get(run.holder)
            if holder is not None:
                holder.in_flight_bytes = max(0, holder.in_flight_bytes - run.num_blocks * self.block_bytes)

    def observe(self, runs: Sequence[HolderRun], timings: Sequence[RunTiming], now: float) -> None:
        """How the first `runs` of a pull went."""
        for run, timing in zip(runs, timings, strict=False):
            if run.wait_s > 0:
                continue
            if timing.outcome in ("late", "failed"):
                self._observe_failure(run, timing, now)
            elif timing.num_ssd_blocks:
                self._observe_ssd(run, timing, now)
            elif timing.num_blocks:
                self._observe_memory(run, timing, now)

    def memory(self, run: HolderRun, now: float) -> Link:
        """What to expect of the memory of a run's holder."""
        holder = self._holders.get(run.holder)
        return self._expected(holder.memory if holder else None, NEAR, now)

    def ssd(self, run: HolderRun, now: float) -> Link:
        """What its SSD adds."""
        holder = self._holders.get(run.holder)
        return self._expected(holder.ssd if holder else None, SSD, now)

    def queue_s(self, run: HolderRun, now: float) -> float:
        """Time that this worker's other pulls from the same holder will take."""
        holder = self._holders.get(run.holder)
        return holder.in_flight_bytes / self.memory(run, now).bytes_per_s if holder else 0.0

    def messages(self, now: float) -> list[HolderLinks]:
        """As routers get them."""
        return [
            HolderLinks(*name, self._message(one.memory, now), self._message(one.ssd, now), one.in_flight_bytes)
            for name, one in self._holders.items()
        ]

    def _observe_memory(self, run: HolderRun, timing: RunTiming, now: float) -> None:
        link = self.memory(run, now)
        rate = link.bytes_per_s
        rest_s = timing.seconds - timing.first_block_s
        if timing.num_blocks > 1 and rest_s > 0:
            # Blocks may come in batches, all of a small pull at once: that says nothing of the rate.
            sample = (timing.num_blocks - 1) * self.block_bytes / rest_s
            rate = _moved(rate, sample, _WEIGHT * min(1.0, _FULL_WEIGHT_RATIO * rest_s / timing.seconds))
        setup_s = max(_MIN_SETUP_S, timing.first_block_s - self.block_bytes / rate)
        learned = Link(rate, _moved(link.setup_s, setup_s, _WEIGHT))
        self._touch(run.holder).memory = _Measured(learned, now)

    def _observe_ssd(self, run: HolderRun, timing: RunTiming, now: float) -> None:
        link, took_s = self.ssd(run, now), self._ssd_share_s(run, timing, timing.seconds, now)
        num_bytes = timing.num_ssd_blocks * self.block_bytes
        if timing.num_ssd_blocks < _FEW_BLOCKS:
            latency_s = max(_MIN_SETUP_S, took_s - num_bytes / link.bytes_per_s)
            link = Link(link.bytes_per_s, _moved(link.setup_s, latency_s, _WEIGHT))
        else:
            sample = num_bytes / max(took_s - link.setup_s, took_s / 2)
            link = Link(_moved(link.bytes_per_s, sample, _WEIGHT), link.setup_s)
        self._touch(run.holder).ssd = _Measured(link, now)

    def _observe_failure(self, run: HolderRun, timing: RunTiming, now: float) -> None:
        """What came is all that the time bought. Late blocks of an SSD are its own fault, no answer is the holder's."""
        failed = timing.outcome == "failed"
        seconds = max(timing.seconds, _FAILED_S if failed else _MIN_SETUP_S)
        num_memory = timing.num_blocks - timing.num_ssd_blocks
        wanted_ssd = num_memory >= run.num_blocks - run.num_ssd_blocks and run.num_ssd_blocks > 0
        if not failed and (timing.num_ssd_blocks or wanted_ssd):
            link = self.ssd(run, now)
            took_s = self._ssd_share_s(run, timing, seconds, now)
            sample = max(1, timing.num_ssd_blocks) * self.block_bytes / took_s
            holder = self._touch(run.holder)
            learned = Link(_moved(link.bytes_per_s, sample, 1.0), link.setup_s)
            holder.ssd = _Measured(learned, now, _failures(holder.ssd) + 1)
            return
        link = self.memory(run, now)
        rate = _moved(link.bytes_per_s, max(1, timing.num_blocks) * self.block_bytes / seconds, 1.0)
        first_s = timing.first_block_s if timing.num_blocks else seconds
        setup_s = _moved(link.setup_s, max(_MIN_SETUP_S, first_s - self.block_bytes / rate), 1.0)
        holder = self._touch(run.holder)
        holder.memory = _Measured(Link(rate, setup_s), now, _failures(holder.memory) + 1)

    def _ssd_share_s(self, run: HolderRun, timing: RunTiming, seconds: float, now: float) -> float:
        num_bytes = (timing.num_blocks - timing.num_ssd_blocks) * self.block_bytes
        return max(seconds - self.memory(run, now).seconds(num_bytes), seconds * _LEAST_SHARE, _MIN_SETUP_S)

    def _expected(self, measured: _Measured | None, assumed: Link, now: float) -> Link:
        assumed = Link(max(assumed.bytes_per_s, WORTH_TRYING * self.compute_bytes_per_s), assumed.setup_s)
        if measured is None:
            return assumed
        return faded(measured.link, assumed, self._freshness(measured, now))

    def _freshness(self, measured: _Measured, now: float) -> float:
        half_life_s = self._half_life_s * min(_MOST_PATIENT, 2.0 ** max(0, measured.failures - 1))
        return float(0.5 ** (max(0.0, now - measured.measured_s) / half_life_s))

    def _message(self, measured: _Measured | None, now: float) -> MeasuredLink | None:
        if measured is None:
            return None
        return MeasuredLink(measured.link.bytes_per_s, measured.link.setup_s, self._freshness(measured, now))

    def _touch(self, name: tuple[str, str, int]) -> _Holder:
        holder = self._holders.setdefault(name, _Holder())
        self._holders.move_to_end(name)
        if len(self._holders) > MAX_HOLDERS:
            idle = (one for one, other in self._holders.items() if not other.in_flight_bytes and other is not holder)
            oldest = next(idle, next(iter(self._holders)))
            del self._holders[oldest]
        return holder


def _failures(measured: _Measured | None) -> int:
    return measured.failures if measured is not None else 0


def _present(runs: Sequence[HolderRun]) -> Iterator[HolderRun]:
    """Those whose blocks are there already."""
    return (run for run in runs if not run.wait_s)


def _moved(value: float, sample: float, weight: float) -> float:
    """`value` moved towards `sample` on a logarithmic scale, a surprise larger than _MOST cut to it."""
    surprise = max(-math.log(_MOST), min(math.log(_MOST), math.log(sample / value)))
    return value * math.exp(weight * surprise)
