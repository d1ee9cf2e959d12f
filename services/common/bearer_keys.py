"""Keys that callers present as `authorization: Bearer KEY`. Files hold hashes of them, never the keys themselves."""

from __future__ import annotations

import hashlib
import secrets

AUTHORIZATION = "authorization"


def new_key(prefix: str) -> str:
    """A fresh key that begins with `prefix`, by which a person knows what it is for."""
    return f"{prefix}-{secrets.token_urlsafe(32)}"


def hash_key(key: str) -> str:
    """What stands for `key` in files."""
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def bearer(key: str) -> tuple[str, str]:
    """The metadata that presents `key`."""
    return (AUTHORIZATION, f"Bearer {key}")


def bearer_key(authorization: str) -> str:
    """The key of such metadata; empty where there is none."""
    scheme, _, key = authorization.strip().partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
