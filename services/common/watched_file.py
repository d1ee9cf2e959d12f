"""A text file that is read again when it changes; a version that is wrong is reported, and the last good one kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from services.common.settings import ConfigurationError

T = TypeVar("T")
_CHECK_EVERY_S = 0.5


class WatchedFile(Generic[T]):
    """`value` is what `parse` made of the newest good version."""

    def __init__(self, path: Path, parse: Callable[[str], T], *, service: str, setting: str) -> None:
        """Raises ConfigurationError when the file cannot be read, or what `parse` raises of it.

        service, setting: whose file it is, for messages; parse raises ConfigurationError.
        """
        self._path = path
        self._name = f"{service}: {setting}"
        self._parse = parse
        self._log = structlog.get_logger(f"{service}.{setting}")
        self._checked_at_s = float("-inf")
        self._reported = ""
        self._stamp, self.value = self._read()

    def refresh(self, now_s: float) -> None:
        """Look whether it has changed, now and then. now_s: monotonic time."""
        if now_s - self._checked_at_s < _CHECK_EVERY_S:
            return
        self._checked_at_s = now_s
        try:
            stat = self._path.stat()
            if (stat.st_mtime_ns, stat.st_size) == self._stamp:
                return
            self._stamp, self.value = self._read()
            self._reported = ""
            self._log.info("file_reloaded")
        except (OSError, ConfigurationError) as error:
            if str(error) != self._reported:
                self._reported = str(error)
                self._log.error("file_not_reloaded", error=self._reported)

    def _read(self) -> tuple[tuple[int, int], T]:
        try:
            stat = self._path.stat()
            return (stat.st_mtime_ns, stat.st_size), self._parse(self._path.read_text())
        except (OSError, UnicodeDecodeError, ConfigurationError) as error:
            raise ConfigurationError(f"{self._name}={self._path}: {error}") from None
