"""What stands between the engine and the mover: how the one's messages about blocks reach the other.

A pool in shared memory is the mover's too: `SharedTransfers` passes messages through. A pool that the mover cannot see
exchanges its blocks by way of a staging area (staging.py), filled and emptied by a `BlockCopier`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.worker.messages import Message


class Copy(Protocol):
    """A copy under way."""

    def is_done(self) -> bool:
        """Whether it has ended; without waiting."""


class BlockCopier(Protocol):
    """Copies between pool and staging."""

    def gather(self, pool_slots: Sequence[int], staging_slots: Sequence[int]) -> Copy:
        """Pool to staging, after every scatter begun so far. Nobody writes to the pool slots before it is done."""

    def scatter(self, staging_slots: Sequence[int], pool_slots: Sequence[int]) -> Copy:
        """Staging to pool, after every step submitted so far and before every later one."""


class BlockTransfers(Protocol):
    """What stands between engine and mover; `to_core` and `to_mover` gather what their owner takes and clears."""

    to_core: list[Message]
    to_mover: list[Message]
    # Transfers that waited for room, and blocks that were not transferred for want of it, by use.
    waits: dict[str, int]
    short_blocks: dict[str, int]

    @property
    def is_settled(self) -> bool:
        """Whether `poll` has nothing to do until the next message."""

    def send(self, message: Message, now: float) -> None:
        """The engine says this to the mover."""

    def receive(self, message: Message, now: float) -> None:
        """The mover says this to the engine."""

    def poll(self, now: float) -> None:
        """Go on with what has waited for a copy or for room."""


class SharedTransfers:
    """The pool is the mover's memory too: messages pass through."""

    is_settled = True

    def __init__(self) -> None:
        self.to_core: list[Message] = []
        self.to_mover: list[Message] = []
        self.waits: dict[str, int] = {}
        self.short_blocks: dict[str, int] = {}

    def send(self, message: Message, now: float) -> None:
        """As it is."""
        self.to_mover.append(message)

    def receive(self, message: Message, now: float) -> None:
        """As it is."""
        self.to_core.append(message)

    def poll(self, now: float) -> None:
        """Nothing waits."""
