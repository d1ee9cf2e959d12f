"""Life of a service process: stop signals, the ready file, death together with the parent, the end."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import signal
import sys
import uuid
from pathlib import Path

from services.common.release import RELEASE

_PR_SET_PDEATHSIG = 1
# Net new objects between passes over the youngest, of these before one over the next older, and of those before a full
# one: the first two take under a millisecond, and cycles, which alone need the last, are rare.
_COLLECTIONS = (700, 5, 1000)


class StopEvent(asyncio.Event):
    """Set when the process is to end. interrupted: by SIGINT, so that nobody need hear of it before."""

    interrupted = False

    def interrupt(self) -> None:
        """End, and tell nobody first."""
        self.interrupted = True
        self.set()


def stop_event() -> StopEvent:
    """An event that SIGTERM and SIGINT set. Call inside the running loop."""
    event = StopEvent()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, event.set)
    loop.add_signal_handler(signal.SIGINT, event.interrupt)
    return event


def generated_instance(service: str) -> str:
    """A name for a process that was given none."""
    return f"{service}-{uuid.uuid4().hex[:8]}"


def write_ready_file(path: Path | None, **addresses: object) -> None:
    """Tell whoever started this process where it listens and its release; atomic, nothing when `path` is None."""
    if path is None:
        return
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"pid": os.getpid(), "release": RELEASE, **addresses}))
    temporary.replace(path)


def spare_collections() -> None:
    """Call once a process is about to serve: what it has made so far stays, and no collection looks through it again.

    A full collection holds every request up for as long as it takes to look at all objects, tens of milliseconds where
    imports alone have made 10^5 of them. Reference counts free nearly everything; for the rest it comes seldom.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTIONS)


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
