"""Who may use the control API: a file of hashed admin keys, read again when it changes.

One line for each key: `sha256:<hex>` and the name of its owner, which is logged with what it changed. Empty lines
and lines that begin with # are skipped. A key itself is in no file of the router and in no log.
"""

from __future__ import annotations

import re
from pathlib import Path

from services.common.bearer_keys import bearer_key, hash_key
from services.common.settings import ConfigurationError
from services.common.watched_file import WatchedFile

_LINE = re.compile(r"(sha256:[0-9a-f]{64})\s+([A-Za-z0-9._-]{1,64})")


def parse_admin_keys(text: str) -> dict[str, str]:
    """Owners by hashed key. Raises ConfigurationError naming the line, never its content."""
    owners: dict[str, str] = {}
    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ConfigurationError(f"line {number}: not 'sha256:<64 hex digits> OWNER'")
        owners[match[1]] = match[2]
    return owners


class AdminKeys:
    """Knows the owner of a bearer key. Without a file nobody is let in."""

    def __init__(self, path: Path | None) -> None:
        """Raises ConfigurationError when the file cannot be read."""
        self._file = (
            None if path is None else WatchedFile(path, parse_admin_keys, service="router", setting="admin_keys_file")
        )

    @property
    def is_open(self) -> bool:
        """Whether any key lets anybody in."""
        return self._file is not None

    def owner_of(self, authorization: str, now_s: float) -> str | None:
        """The owner of the key of an Authorization header; None for a wrong one. now_s: monotonic time."""
        if self._file is None:
            return None
        self._file.refresh(now_s)
        # The lookup is by the hash of what was sent, so its timing tells nothing of a key.
        return self._file.value.get(hash_key(bearer_key(authorization)))
