"""The keys that SSD payloads are encrypted under: one for each owner, itself encrypted under a key of the mesh.

They lie in one file of fixed slots that are written in place, so that destroying a key overwrites it. A key has a
random id, which every record names: what was stored under a key that is gone does not count any more, whether its
payload was encrypted or not. Runs in the writer's thread; lookups are allowed from everywhere.
"""

from __future__ import annotations

import os
import secrets
import struct
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from services.kvstore.ssd_format import KEY_ID_BYTES, NONCE_BYTES

MAX_OWNERS = 4096
_SLOT = struct.Struct("<16s8s12s48s12x")
KEY_FILE_BYTES = MAX_OWNERS * _SLOT.size


@dataclass(frozen=True, slots=True)
class OwnerKey:
    """An owner's key in force."""

    key_id: bytes
    cipher: AESGCM


class TooManyOwners(Exception):
    """Every slot of the key file is taken."""


class OwnerKeys:
    """Open on construction; raises OSError."""

    def __init__(self, path: Path, wrapping_key: bytes) -> None:
        self._wrapping = AESGCM(wrapping_key)
        self._keys: dict[bytes, OwnerKey] = {}
        self._slots: dict[bytes, int] = {}
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(self._fd, 0, KEY_FILE_BYTES)
        data = os.pread(self._fd, KEY_FILE_BYTES, 0)
        for slot in range(MAX_OWNERS):
            self._load(slot, *_SLOT.unpack_from(data, slot * _SLOT.size))
        self._free = sorted(set(range(MAX_OWNERS)) - set(self._slots.values()), reverse=True)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def num_free(self) -> int:
        """Owners that can still get a key."""
        return len(self._free)

    @property
    def owners(self) -> list[bytes]:
        """Whoever has a key in the file, also one that could not be destroyed."""
        return list(self._slots)

    def find(self, owner: bytes, key_id: bytes) -> OwnerKey | None:
        """The owner's key if it is still this one."""
        key = self._keys.get(owner)
        return key if key is not None and key.key_id == key_id else None

    def obtain(self, owner: bytes) -> OwnerKey:
        """The owner's key, made and durable if it has none. Raises OSError or TooManyOwners."""
        found = self._keys.get(owner)
        if found is not None:
            return found
        if not self._free:
            raise TooManyOwners(f"{MAX_OWNERS} owners have keys")
        raw, key_id, nonce = AESGCM.generate_key(256), secrets.token_bytes(KEY_ID_BYTES), os.urandom(NONCE_BYTES)
        slot = self._free[-1]
        self._write(slot, _SLOT.pack(owner, key_id, nonce, self._wrapping.encrypt(nonce, raw, owner + key_id)))
        self._free.pop()
        self._slots[owner] = slot
        key = self._keys[owner] = OwnerKey(key_id, AESGCM(raw))
        return key

    def destroy(self, owner: bytes) -> bool:
        """Overwrite the owner's key; whether there was one. Raises OSError."""
        slot = self._slots.get(owner)
        if slot is None:
            return False
        self._keys.pop(owner, None)
        self._write(slot, os.urandom(_SLOT.size))
        self._write(slot, bytes(_SLOT.size))
        del self._slots[owner]
        self._free.append(slot)
        return True

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _load(self, slot: int, owner: bytes, key_id: bytes, nonce: bytes, wrapped: bytes) -> None:
        if not any(wrapped):
            return
        try:
            raw = self._wrapping.decrypt(nonce, wrapped, owner + key_id)
        except InvalidTag:
            return
        self._keys[owner] = OwnerKey(key_id, AESGCM(raw))
        self._slots[owner] = slot

    def _write(self, slot: int, data: bytes) -> None:
        os.pwrite(self._fd, data, slot * _SLOT.size)
        os.fsync(self._fd)
