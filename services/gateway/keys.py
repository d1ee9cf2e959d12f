"""API keys: a file of hashed keys and their tenants, read again when it changes.

One line for each key: `sha256:<hex>` or `blake2b:<hex>` (32-byte digests), the tenant, and optionally the tenant's
cache generation. Empty lines and lines that begin with # are skipped. A key itself is in no file and no log.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import structlog

from services.common.bearer_keys import bearer_key
from services.common.settings import ConfigurationError
from services.common.watched_file import WatchedFile
from services.gateway.errors import AuthenticationFailed
from services.gateway.planning import Tenant

DEFAULT_TENANT = Tenant("default")
_LINE = re.compile(r"(sha256|blake2b):([0-9a-f]{64})\s+([A-Za-z0-9._-]{1,64})(?:\s+(\d{1,18}))?")
_log = structlog.get_logger("gateway.keys")


def parse_keys(text: str) -> dict[str, Tenant]:
    """Tenants by hashed key. Raises ConfigurationError naming the line, never its content."""
    tenants: dict[str, Tenant] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ConfigurationError(f"line {number}: not 'sha256:<64 hex digits> TENANT [GENERATION]'")
        name, tenant = f"{match[1]}:{match[2]}", Tenant(match[3], int(match[4] or 0))
        if tenants.setdefault(name, tenant) != tenant:
            raise ConfigurationError(f"line {number}: the key is above already, for another tenant")
    return tenants


class KeyRing:
    """Knows the tenant of a bearer key. With no file everybody is the tenant `default`."""

    def __init__(self, path: Path | None) -> None:
        """Raises ConfigurationError when the file cannot be read."""
        self._file = None if path is None else WatchedFile(path, parse_keys, service="gateway", setting="keys_file")
        if path is None:
            _log.warning("no_authentication", detail="keys_file is not set: every caller is the tenant 'default'")

    def tenant_of(self, authorization: str, now_s: float) -> Tenant:
        """The tenant of an Authorization header. now_s: monotonic time. Raises AuthenticationFailed."""
        if self._file is None:
            return DEFAULT_TENANT
        self._file.refresh(now_s)
        key = bearer_key(authorization)
        if not key:
            raise AuthenticationFailed("an API key is needed: Authorization: Bearer KEY")
        raw = key.encode()
        for name, digest in (
            ("sha256", hashlib.sha256(raw)),
            ("blake2b", hashlib.blake2b(raw, digest_size=32)),
        ):
            tenant = self._file.value.get(f"{name}:{digest.hexdigest()}")
            if tenant is not None:
                return tenant
        raise AuthenticationFailed("incorrect API key")
