"""Segments of the SSD that are being read; who wants to remove one waits. For one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence


class SegmentPins:
    """Counts readers by segment."""

    def __init__(self) -> None:
        self._readers: Counter[int] = Counter()
        self._released = asyncio.Event()

    def __len__(self) -> int:
        """Segments that are being read."""
        return len(self._readers)

    @contextlib.contextmanager
    def held(self, segments: Sequence[int]) -> Iterator[None]:
        """Nobody removes these during the block; a segment may be named more than once."""
        readers = Counter(segments)
        self._readers += readers
        try:
            yield
        finally:
            # Drops the segments whose count is zero.
            self._readers -= readers
            self._released.set()

    async def released(self, segment: int, timeout_s: float) -> None:
        """Wait until nobody reads a segment. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while segment in self._readers:
                self._released.clear()
                await self._released.wait()
