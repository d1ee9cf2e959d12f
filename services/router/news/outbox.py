"""News not yet sent. Bounded: old news is dropped first, since workers' reports will show it before long anyway."""

from __future__ import annotations

import asyncio
from collections import deque

from services.router.news.messages import News

_MOST = 4096


class NewsOutbox:
    """Filled by decisions, emptied by whoever sends."""

    def __init__(self, most: int = _MOST) -> None:
        self._news: deque[News] = deque(maxlen=most)
        self.filled = asyncio.Event()
        self.dropped = 0

    def put(self, news: News) -> None:
        """Have it sent soon."""
        self.dropped += len(self._news) == self._news.maxlen
        self._news.append(news)
        self.filled.set()

    def take(self) -> list[News]:
        """All that there is; nothing is kept."""
        news = list(self._news)
        self._news.clear()
        self.filled.clear()
        return news
