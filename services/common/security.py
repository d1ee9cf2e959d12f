"""The mesh secret: how processes of one mesh prove that they belong to it, and the keys derived from it.

Every key is a BLAKE2b derivation of the secret under its purpose, so that the one that hashes blocks is not the one
that travels in gRPC metadata.
"""

from __future__ import annotations

import hmac
import os
import secrets
from hashlib import blake2b
from pathlib import Path

from services.common.settings import ConfigurationError, ServiceSettings

MIN_SECRET_CHARACTERS = 16


class MeshSecret:
    """Holds the secret and hands out keys by purpose; never shows it."""

    def __init__(self, secret: str) -> None:
        if len(secret) < MIN_SECRET_CHARACTERS:
            raise ConfigurationError(f"mesh_secret: shorter than {MIN_SECRET_CHARACTERS} characters")
        self._secret = secret.encode()

    def __repr__(self) -> str:
        return "MeshSecret(***)"

    def _key(self, purpose: bytes) -> bytes:
        return blake2b(self._secret, digest_size=32, person=purpose.ljust(16, b"\0")).digest()

    @property
    def block_key(self) -> bytes:
        """Key of block ids."""
        return self._key(b"kvm block id")

    @property
    def pull_key(self) -> bytes:
        """Key of the pull handshake."""
        return self._key(b"kvm pull")

    @property
    def storage_key(self) -> bytes:
        """Key that encrypts the keys of stored blocks."""
        return self._key(b"kvm storage")

    @property
    def request_key(self) -> bytes:
        """Key of what stands for idempotency keys and the requests under them."""
        return self._key(b"kvm request")

    @property
    def rpc_token(self) -> str:
        """What in-mesh gRPC calls carry in metadata."""
        return self._key(b"kvm rpc").hex()

    def matches_rpc_token(self, token: str) -> bool:
        """Whether `token` proves the secret, in constant time."""
        return hmac.compare_digest(token.encode(), self.rpc_token.encode())


def load_mesh_secret(settings: ServiceSettings) -> MeshSecret:
    """The secret of the settings or of their file. Raises ConfigurationError."""
    given = settings.mesh_secret.get_secret_value()
    if given:
        return MeshSecret(given)
    if settings.mesh_secret_file is None:
        raise ConfigurationError(f"{settings.service}: mesh_secret or mesh_secret_file must be set")
    try:
        return MeshSecret(settings.mesh_secret_file.read_text().strip())
    except OSError as error:
        raise ConfigurationError(
            f"{settings.service}: mesh_secret_file={settings.mesh_secret_file}: {error.strerror}"
        ) from None


def create_secret_file(path: Path) -> None:
    """Write a fresh secret to `path` with mode 0600 unless it is there already."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
