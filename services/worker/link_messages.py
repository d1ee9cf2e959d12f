"""What messages between the processes of a worker say of links and of pulls over them."""

from __future__ import annotations

import msgspec


class MeasuredLink(msgspec.Struct, frozen=True, array_like=True):
    """What pulls from one tier of one holder have taught; freshness falls from 1 to 0 while none teaches anew."""

    bytes_per_s: float
    setup_s: float
    freshness: float


class HolderLinks(msgspec.Struct, frozen=True, array_like=True):
    """Of one holder that this worker pulls from: its memory, its SSD, and what is being pulled from it now."""

    kind: str
    location_id: str
    epoch: int
    memory: MeasuredLink | None
    ssd: MeasuredLink | None
    in_flight_bytes: int


class RunTiming(msgspec.Struct, frozen=True, array_like=True):
    """How one run of a pull went: blocks that arrived, how many of them from an SSD, and the time.

    first_block_s: from the run's start to its first block, 0 when none came. outcome: "ok" (everything came), "short"
    (the holder had less), "late" (cut, or its deadline passed) or "failed" (no answer, a refusal, a wrong block).
    """

    num_blocks: int
    num_ssd_blocks: int
    first_block_s: float
    seconds: float
    outcome: str
