"""What the kernel says of a process."""

from __future__ import annotations

from pathlib import Path


def process_state(pid: int) -> str:
    """One letter as in `ps`, such as S, T (stopped) or Z (waits to be reaped); empty: there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]
