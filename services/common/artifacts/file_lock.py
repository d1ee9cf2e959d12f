"""Locks on files that die with their process (flock), each wait with a deadline."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

from services.common.artifacts.errors import CopyTimeout

_POLL_S = 0.01


class FileLock:
    """One held lock. Close it, or use it as a context manager; closing twice is fine."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def close(self) -> None:
        """Let go."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def try_lock(path: Path, *, shared: bool = False) -> FileLock | None:
    """Lock a file, made where it is missing; None when others hold it in a way that forbids this."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return FileLock(descriptor)


def lock(path: Path, timeout_s: float) -> FileLock:
    """Lock a file alone. Raises CopyTimeout when it was not to be had in time."""
    deadline_s = time.monotonic() + timeout_s
    while (held := try_lock(path)) is None:
        if time.monotonic() > deadline_s:
            raise CopyTimeout(f"{path}: locked by another process for {timeout_s:g} s")
        time.sleep(_POLL_S)
    return held
