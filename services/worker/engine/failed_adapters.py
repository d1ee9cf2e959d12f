"""Remembers for a while which folders hold no adapter that can be served, so that not each request reads them again."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.common.adapter_files import CONFIG_FILE, WEIGHTS_FILE, InvalidAdapter
from services.worker.adapters.source import AdapterRef
from services.worker.model.adapter import PreparedAdapter

# What is not seen in a file's status, another mount or other limits, is noticed after so long.
REMEMBERED_S = 10.0
_MOST_REMEMBERED = 256
# Of each file device, inode, size and times of change; None: there is none.
_Identity = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class _Failure:
    identity: _Identity
    until_s: float
    reason: str


class RememberedFailures:
    """A loader that does not try again what has just failed while its files are the same. Called on several threads."""

    def __init__(
        self, load: Callable[[AdapterRef], PreparedAdapter], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """load: raises InvalidAdapter."""
        self._load = load
        self._clock = clock
        self._failures: OrderedDict[AdapterRef, _Failure] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, adapter: AdapterRef) -> PreparedAdapter:
        """What `load` gives. Raises InvalidAdapter."""
        identity = _identity(Path(adapter.path))
        with self._lock:
            known = self._failures.get(adapter)
        if known is not None and known.identity == identity and self._clock() < known.until_s:
            raise InvalidAdapter(known.reason)
        try:
            return self._load(adapter)
        except InvalidAdapter as error:
            with self._lock:
                self._failures[adapter] = _Failure(identity, self._clock() + REMEMBERED_S, str(error))
                self._failures.move_to_end(adapter)
                if len(self._failures) > _MOST_REMEMBERED:
                    self._failures.popitem(last=False)
            raise


def _identity(folder: Path) -> _Identity:
    return tuple(_status(folder / name) for name in (CONFIG_FILE, WEIGHTS_FILE))


def _status(path: Path) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
