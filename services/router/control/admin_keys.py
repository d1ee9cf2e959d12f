"""Who may use the control API: a file of hashed admin keys, read again when it changes.

One line for each key: `sha256:<hex>` and the name of its owner, which is logged with what it changed. Empty lines
and lines that begin with # are skipped. A key itself is in no file of the router and in no log.
"""

from __future__ import annotations

import re
from pathlib import Path

import structlog

from services.common.bearer_keys import bearer_key, hash_key
from services.common.settings import ConfigurationError

_LINE = re.compile(r"(sha256:[0-9a-f]{64})\s+([A-Za-z0-9._-]{1,64})")
_CHECK_EVERY_S = 0.5
_log = structlog.get_logger()


def parse_admin_keys(text: str) -> dict[str, str]:
    """Owners by hashed key. Raises ConfigurationError naming the line, never its content."""
    owners: dict[str, str] = {}
    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ConfigurationError(f"admin_keys_file: line {number}: not 'sha256:<64 hex digits> OWNER'")
        owners[match[1]] = match[2]
    return owners


class AdminKeys:
    """Knows the owner of a bearer key. Without a file nobody is let in."""

    def __init__(self, path: Path | None) -> None:
        """Raises ConfigurationError when the file cannot be read."""
        self._path = path
        self._stamp, self._owners = ((0, 0), {}) if path is None else _read(path)
        self._checked_at_s = float("-inf")

    @property
    def is_open(self) -> bool:
        """Whether any key lets anybody in."""
        return self._path is not None

    def owner_of(self, authorization: str, now_s: float) -> str | None:
        """The owner of the key of an Authorization header; None for a wrong one. now_s: monotonic time."""
        if self._path is not None:
            self._refresh(self._path, now_s)
        # The lookup is by the hash of what was sent, so its timing tells nothing of a key.
        return self._owners.get(hash_key(bearer_key(authorization)))

    def _refresh(self, path: Path, now_s: float) -> None:
        if now_s - self._checked_at_s < _CHECK_EVERY_S:
            return
        self._checked_at_s = now_s
        try:
            stat = path.stat()
            if (stat.st_mtime_ns, stat.st_size) == self._stamp:
                return
            self._stamp, self._owners = _read(path)
            _log.info("admin keys reloaded", keys=len(self._owners))
        except (OSError, ConfigurationError) as error:
            _log.error("admin keys not reloaded", error=str(error))


def _read(path: Path) -> tuple[tuple[int, int], dict[str, str]]:
    try:
        stat = path.stat()
        return (stat.st_mtime_ns, stat.st_size), parse_admin_keys(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"router: admin_keys_file={path}: {error}") from None
