"""How far batches are, for whoever asks: their logs are read on from where the last look at them ended. Blocking.

A log may be large, so each is read by one caller at a time. Nobody waits for that: whoever comes meanwhile is told what
the last look found. A look that fails is forgotten with all before it, since it may have counted a part.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from services.gateway.batches.result_log import Counts

# Batches of which is kept how far they were read, a few hundred bytes each; of others it is read anew.
_MAX_KEPT = 4096


@dataclass(slots=True)
class _Reader:
    counts: Counts
    told: tuple[int, int] = (0, 0)
    lock: Lock = field(default_factory=Lock)


class Progress:
    """Owner of the counts. Its methods may be called by several threads."""

    def __init__(self, max_kept: int = _MAX_KEPT) -> None:
        self._max_kept = max_kept
        self._readers: OrderedDict[str, _Reader] = OrderedDict()
        self._lock = Lock()

    def of(self, batch_id: str, folder: Path) -> tuple[int, int]:
        """Lines with an answer of status 200, and with another: now, or at the last look while there is one under way.

        Before the first has ended, none. Raises OSError.
        """
        reader = self._reader(batch_id, folder)
        if not reader.lock.acquire(blocking=False):
            return reader.told
        try:
            reader.counts.refresh()
            reader.told = reader.counts.num_ok, reader.counts.num_failed
            return reader.told
        except BaseException:
            self.forget(batch_id)
            raise
        finally:
            reader.lock.release()

    def forget(self, batch_id: str) -> None:
        """It is over, or is to be read anew. Idempotent."""
        with self._lock:
            self._readers.pop(batch_id, None)

    def _reader(self, batch_id: str, folder: Path) -> _Reader:
        with self._lock:
            reader = self._readers.pop(batch_id, None) or _Reader(Counts(folder))
            self._readers[batch_id] = reader
            if len(self._readers) > self._max_kept:
                self._readers.popitem(last=False)
            return reader
