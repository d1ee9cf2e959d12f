"""What follows from an idempotency key: the names, the seed and the digest of its request. Pure.

All of it is a keyed hash of the tenant and the key, so that no other tenant's request has the same and nothing can be
read from what is written down.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from services.common.blocks import tagged
from services.gateway.errors import InvalidRequest

KEY_METADATA = "idempotency-key"
_MAX_CHARACTERS = 255
_TAG_TENANT, _TAG_KEY, _TAG_BODY = 1, 2, 3
_TAG_BYTES, _SEED_BYTES = 16, 8


@dataclass(frozen=True, slots=True)
class KeyedNames:
    """tag: names the request in Redis, and in part in its answer. seed: where the request brings none."""

    tag: str
    seed: int

    @property
    def answer_id(self) -> str:
        """The id of the answer, which a repeat gets too."""
        return self.tag[:24]


def check_key(key: str) -> None:
    """Raise InvalidRequest for a key that is none."""
    if not (1 <= len(key) <= _MAX_CHARACTERS and key.isascii() and key.isprintable()):
        raise InvalidRequest(
            f"Idempotency-Key must be 1 to {_MAX_CHARACTERS} printable ASCII characters", "Idempotency-Key"
        )


def names_of(secret: bytes, tenant: str, key: str) -> KeyedNames:
    """The names of a tenant's request. secret: 16 to 64 bytes."""
    hashed = _hash(secret, [(_TAG_TENANT, tenant.encode()), (_TAG_KEY, key.encode())], _TAG_BYTES + _SEED_BYTES)
    return KeyedNames(tag=hashed[:_TAG_BYTES].hex(), seed=int.from_bytes(hashed[_TAG_BYTES:], "little"))


def body_digest(secret: bytes, api: str, body: bytes) -> str:
    """Tells one request from another under the same key."""
    return _hash(secret, [(_TAG_BODY, api.encode()), (_TAG_BODY, body)], _TAG_BYTES).hex()


def _hash(secret: bytes, parts: Iterable[tuple[int, bytes]], size: int) -> bytes:
    return blake2b(tagged(parts), digest_size=size, key=secret).digest()
