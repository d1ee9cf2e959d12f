"""What the engine tells the front of its load: how far it is, and in the end where its memory goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from services.worker.engine_messages import LoadProgress, MemoryFigures
from services.worker.model.memory import MemoryMap

_TELL_EVERY_S = 0.2


class ProgressTeller:
    """Counts bytes read by many threads and tells of them a few times a second, and at the end."""

    def __init__(
        self, total_bytes: int, send: Callable[[LoadProgress], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """send: called under a lock, by whichever thread has read the bytes."""
        self._total_bytes = total_bytes
        self._send = send
        self._clock = clock
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._next_s = clock()

    def add(self, count: int) -> None:
        """So many bytes more."""
        with self._lock:
            self._done_bytes += count
            now = self._clock()
            if now >= self._next_s or self._done_bytes >= self._total_bytes:
                self._next_s = now + _TELL_EVERY_S
                self._send(LoadProgress(self._done_bytes, self._total_bytes))


def memory_figures(memory: MemoryMap) -> MemoryFigures:
    """The map as a message."""
    return MemoryFigures(
        device=memory.device,
        total_bytes=memory.total_bytes,
        weight_bytes=memory.weight_bytes,
        reserve_bytes=memory.reserve_bytes,
        kv_bytes=memory.kv_bytes,
        block_bytes=memory.block_bytes,
        num_blocks=memory.num_blocks,
        kv_tokens=memory.kv_tokens,
        staging_bytes=memory.staging_bytes,
        adapter_bytes=memory.adapter_bytes,
        max_context=memory.max_context,
        largest_context=memory.largest_context,
        unused_bytes=memory.unused_bytes,
    )
