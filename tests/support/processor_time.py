"""Whether processes are idle, by the processor time they take: true of some window, whatever else the machine does.

Accounting is coarse and what a start leaves behind takes a while, so several windows are tried; a process that polls or
spins is over the limit in each.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

_WINDOW_S = 2.0
_WINDOWS = 5


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
