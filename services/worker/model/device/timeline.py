"""What happens after what on a device: steps, results and copies of blocks on streams of their own, marks between them.

On CPU everything is done when the call returns, so a timeline is empty there and the same code runs on both.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Literal, Protocol

import torch

# Steps; their results on the way to the host; blocks that leave the pool; blocks that come into it.
Lane = Literal["steps", "results", "out", "in"]
LANES: tuple[Lane, ...] = ("steps", "results", "out", "in")
_URGENT: tuple[Lane, ...] = ("steps", "results")


class Mark(Protocol):
    """A point in a lane."""

    def is_done(self) -> bool:
        """Whether the lane is past it; without waiting."""

    def wait(self) -> None:
        """Wait until it is."""


class Timeline(Protocol):
    """The lanes of a replica's device."""

    def on(self, lane: Lane) -> AbstractContextManager[object]:
        """What is launched inside goes to the lane, in order."""

    def mark(self, lane: Lane) -> Mark:
        """After everything launched in the lane so far."""

    def after(self, lane: Lane, mark: Mark) -> None:
        """What is launched in the lane from now on comes after the mark."""


class _Done:
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


DONE: Mark = _Done()


class CpuTimeline:
    """Everything in its turn."""

    def on(self, lane: Lane) -> AbstractContextManager[object]:
        """See Timeline."""
        return contextlib.nullcontext()

    def mark(self, lane: Lane) -> Mark:
        """See Timeline."""
        return DONE

    def after(self, lane: Lane, mark: Mark) -> None:
        """It does."""


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def is_done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()


class CudaTimeline:
    """A stream for each lane; steps and results go first where kernels compete for the chip."""

    def __init__(self, device: torch.device) -> None:
        self._streams: dict[Lane, torch.cuda.Stream] = {
            lane: torch.cuda.Stream(device, priority=-1 if lane in _URGENT else 0)  # type: ignore[no-untyped-call]
            for lane in LANES
        }

    def on(self, lane: Lane) -> AbstractContextManager[object]:
        """See Timeline."""
        return torch.cuda.stream(self._streams[lane])

    def mark(self, lane: Lane) -> Mark:
        """See Timeline."""
        return _CudaMark(self._streams[lane])

    def after(self, lane: Lane, mark: Mark) -> None:
        """See Timeline."""
        if isinstance(mark, _CudaMark):
            self._streams[lane].wait_event(mark.event)


def timeline(device: torch.device) -> Timeline:
    """The timeline of a device."""
    return CudaTimeline(device) if device.type == "cuda" else CpuTimeline()
