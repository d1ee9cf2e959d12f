"""Life of a service process: stop signals, the ready file, death together with the parent, the end."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
import uuid
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def stop_event() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set. Call inside the running loop."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    return event


def generated_instance(service: str) -> str:
    """A name for a process that was given none."""
    return f"{service}-{uuid.uuid4().hex[:8]}"


def write_ready_file(path: Path | None, **addresses: object) -> None:
    """Tell whoever started this process where it listens; atomic, nothing when `path` is None."""
    if path is None:
        return
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"pid": os.getpid(), **addresses}))
    temporary.replace(path)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends (Linux); exits at once if that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise SystemExit(1)


def end_process(status: int) -> None:
    """Leave at once: everything is closed and flushed, and UCX's own teardown at interpreter exit can hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
