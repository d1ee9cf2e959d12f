"""Log files of processes: opened for appending, kept bounded, shown and followed."""

from __future__ import annotations

import os
import shutil
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

MAX_LOG_BYTES = 16 * 2**20
_FOLLOW_INTERVAL_S = 0.2


def open_log(path: Path) -> int:
    """A descriptor that appends; the writer keeps it across `rotate`."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def rotate(path: Path, max_bytes: int = MAX_LOG_BYTES) -> bool:
    """Move the text of a file that has grown too large to `NAME.log.1` and empty it in place.

    The writer is another process and goes on with its descriptor; lines written between copy and truncation are lost.
    """
    if not path.exists() or path.stat().st_size <= max_bytes:
        return False
    old = path.with_name(path.name + ".1")
    shutil.copyfile(path, old)
    old.chmod(0o600)
    os.truncate(path, 0)
    return True


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a file, without line ends; none when there is no file."""
    if not path.exists():
        return []
    with path.open(errors="replace") as file:
        return [line.rstrip("\n") for line in deque(file, maxlen=count)]


def follow(path: Path) -> Iterator[str]:
    """Text appended from now on, for ever; begins again where the file was emptied."""
    with path.open(errors="replace") as file:
        file.seek(0, os.SEEK_END)
        while True:
            if text := file.read():
                yield text
                continue
            if path.stat().st_size < file.tell():
                file.seek(0)
            time.sleep(_FOLLOW_INTERVAL_S)
