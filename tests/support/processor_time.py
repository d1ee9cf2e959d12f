"""Whether processes are idle, by the processor time they take: true of some window, whatever else the machine does.

What a start leaves behind takes a while, so several windows are tried; a process that polls or spins is over the limit
in each.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

_WINDOW_S = 1.0
_WINDOWS = 20


def cpu_seconds(pid: int) -> float:
    """Time that a process's living threads have run so far, to the nanosecond."""
    spent_ns = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            spent_ns += int((thread / "schedstat").read_text().split()[0])
    return spent_ns / 1e9


async def idle_share(*pids: int, below: float) -> float:
    """Largest share of a core that any of `pids` takes: in the first window where it is under `below`, or the last."""
    share = 0.0
    for _ in range(_WINDOWS):
        before_s = [cpu_seconds(pid) for pid in pids]
        await asyncio.sleep(_WINDOW_S)
        spent_s = (cpu_seconds(pid) - start_s for pid, start_s in zip(pids, before_s, strict=True))
        if (share := max(spent_s) / _WINDOW_S) < below:
            break
    return share
