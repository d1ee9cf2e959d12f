"""What the scheduler's side knows of adapters. What loads them is in engine/adapters.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from services.worker.errors import Refused


class AdapterRef(msgspec.Struct, frozen=True, array_like=True):
    """An adapter: the digest that its content must have, 16 bytes, and the folder that it is read from."""

    digest: bytes
    path: str


class AdapterFigures(msgspec.Struct, frozen=True, array_like=True):
    """resident: digests of the loaded adapters, the most recently used first; resident_bytes: of these together. idle:
    slots that another could have now, as far as there is memory for it.

    The others are counts and seconds since the start: loads and what they took, failed ones, adapters that gave way to
    others, requests that had to wait for a slot and, of the present, those that wait; stalls: loads that were given up
    because the files did not come. load_s: of one load, as expected.
    """

    resident: list[bytes] = []
    idle: int = 0
    loads: int = 0
    load_seconds: float = 0.0
    failures: int = 0
    evictions: int = 0
    waits: int = 0
    waiting: int = 0
    load_s: float = 0.0
    resident_bytes: int = 0
    stalls: int = 0


class AdapterSource(Protocol):
    """Where an engine has its adapters. Requests are named by their keys."""

    @property
    def is_settled(self) -> bool:
        """Whether nothing is to be taken, now or later."""

    @property
    def figures(self) -> AdapterFigures:
        """Of the present."""

    def has_room(self, adapter: AdapterRef) -> bool:
        """Whether a request for this adapter may begin."""

    def begin(self, key: int, adapter: AdapterRef, now: float) -> None:
        """Have the adapter of a request loaded, if it is not; there must be room."""

    def take(self, now: float) -> Sequence[tuple[int, int | Refused]]:
        """The slots that requests have been given since the last call, or why they get none."""

    def waits_for_place(self, key: int) -> bool:
        """Whether a request that has begun waits for others to end; else its adapter is there or being loaded."""

    def release(self, key: int) -> None:
        """The request has ended. Idempotent; requests without an adapter may be named."""
