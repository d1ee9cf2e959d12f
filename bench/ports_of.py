"""Which TCP ports a process listens on, from /proc (Linux): what a cut of its links has to name."""

from __future__ import annotations

import os
from pathlib import Path

_LISTENS = "0A"


def listening_ports(pid: int) -> set[int]:
    """Of a process; empty when it is gone."""
    try:
        targets = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
        lines = [
            line for table in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()
        ]
    except OSError:
        return set()
    inodes = {target[len("socket:[") : -1] for target in targets if target.startswith("socket:[")}
    rows = [line.split() for line in lines]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTENS and row[9] in inodes}
