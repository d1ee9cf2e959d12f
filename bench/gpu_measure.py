"""Timing on a GPU: medians between CUDA events, with the second-level cache emptied, and the limits to compare with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

FLUSH_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured: bytes/s of a copy on the device, read and written counted; FLOP/s of a large BF16 product."""

    copy_bytes_per_s: float
    matmul_flop_per_s: float


class Timer:
    """Milliseconds of a call on the device. On CPU, where only the plumbing is tried, of one call by the clock."""

    def __init__(self, device: torch.device, repeats: int = 15) -> None:
        self.device = device
        self._repeats = repeats
        self._flush = torch.empty(FLUSH_BYTES if device.type == "cuda" else 0, dtype=torch.uint8, device=device)

    def milliseconds(self, call: Callable[[], object], *, cold: bool = True, captured: bool = True) -> float:
        """Median after two calls to warm up. cold: what was in the second-level cache is written over before each.

        captured: the launches alone, in a graph, so that what Python takes to launch them does not count.
        """
        if self.device.type != "cuda":
            started_s = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - started_s)
        for _ in range(2):
            call()
        if captured:
            call = self._captured(call)
        pairs = [self._timed(call, cold) for _ in range(self._repeats)]
        torch.cuda.synchronize(self.device)
        return float(statistics.median(begin.elapsed_time(end) for begin, end in pairs))

    def _captured(self, call: Callable[[], object]) -> Callable[[], object]:
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graph.replay()
        return graph.replay

    def _timed(self, call: Callable[[], object], cold: bool) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        if cold:
            self._flush.zero_()
        begin.record()
        call()
        end.record()
        return begin, end


def measure_limits(timer: Timer) -> Limits:
    """Of the device, in its present state."""
    on_gpu = timer.device.type == "cuda"
    num_bytes, size = (2**30, 8192) if on_gpu else (2**20, 64)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    copy_ms = timer.milliseconds(lambda: target.copy_(source))
    a = torch.randn(size, size, dtype=torch.bfloat16, device=timer.device)
    matmul_ms = timer.milliseconds(lambda: a @ a, cold=False)
    return Limits(2 * num_bytes / copy_ms * 1e3, 2 * size**3 / matmul_ms * 1e3)


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table. ratio: of the limit reached, or the floor over the time; target 0: none is set.

    error: why there is no figure.
    """

    name: str
    milliseconds: float = 0.0
    figure: str = ""
    limit: str = ""
    ratio: float = 0.0
    target: float = 0.0
    at_most: bool = False
    error: str = ""

    @property
    def meets(self) -> bool:
        """Whether the target is met; true without one."""
        if self.error:
            return False
        if not self.target:
            return True
        return self.ratio <= self.target if self.at_most else self.ratio >= self.target


def bandwidth_row(name: str, ms: float, num_bytes: float, limits: Limits, target: float = 0.0) -> Row:
    """Bytes over time against the copy's."""
    rate = num_bytes / ms * 1e3
    return Row(name, ms, f"{rate / 1e9:.0f} GB/s", "copy", rate / limits.copy_bytes_per_s, target)


def compute_row(name: str, ms: float, flop: float, limits: Limits) -> Row:
    """Operations over time against the large product's."""
    rate = flop / ms * 1e3
    return Row(name, ms, f"{rate / 1e12:.1f} TFLOP/s", "matmul", rate / limits.matmul_flop_per_s)
