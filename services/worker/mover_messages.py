"""What the mover says and is told: pulls and pushes of blocks, pins for remote pullers, failing nodes, counters.

Ids are concatenated, 16 bytes each. Where to push is told by the front (`PushTarget`). A slot that the mover
reads or writes stays pinned by the engine until the message that ends the operation.
"""

from __future__ import annotations

import msgspec

from services.worker.link_messages import RunTiming
from services.worker.messages import HolderRun, Message


class PullBlocks(Message, frozen=True):
    """Fetch blocks `ids` into pool `slots` (same length, prefix order) from `runs`, whose indices are into `ids`.

    deadline_s: seconds that the pull may take, from sending. A pull that lags behind computing the same blocks, one
    every block_compute_s, by more than patience_s is cut: PullCut, and PullDone once its slots are free. 0: never, as
    where a run waits for blocks that another worker computes.
    """

    key: int
    request_id: str
    ids: bytes
    slots: list[int]
    runs: list[HolderRun]
    deadline_s: float
    traceparent: str
    patience_s: float = 0.0
    block_compute_s: float = 0.0


class CancelPull(Message, frozen=True):
    """End a pull; PullDone still comes, and the slots stay the mover's until then."""

    key: int


class PullCut(Message, frozen=True):
    """A pull is given up: the first `num_blocks` are verified in their slots and its request may go on.

    The other slots stay the mover's until PullDone, which repeats the count and brings no timings.
    """

    key: int
    num_blocks: int
    tiers: list[str]
    runs: list[RunTiming]


class PullDone(Message, frozen=True):
    """A pull has ended: the first `num_blocks` are verified in their slots, the rest untouched by now.

    tiers: of each arrived block, "peer", "ram" or "ssd". runs: of each run that was begun, in order.
    """

    key: int
    num_blocks: int
    tiers: list[str]
    error: str
    runs: list[RunTiming] = msgspec.field(default_factory=list)


class PushBlocks(Message, frozen=True):
    """Offer blocks in pool `slots` to the kvstore. `parents[i]` is the parent id of `ids[i]`. Never blocks anybody.

    starts_chain: ids[0] is the first block of a prompt, its parent a root. Otherwise the kvstore must hold the parent.
    """

    key: int
    ids: bytes
    parents: bytes
    slots: list[int]
    owner_digest: bytes
    traceparent: str
    starts_chain: bool = False


class PushDone(Message, frozen=True):
    """The slots of a push are free again. `accepted` counts leading blocks that the kvstore now holds.

    location_id, epoch: the node that was pushed to. refused: it answered that it would not keep the next block.
    """

    key: int
    accepted: int
    location_id: str = ""
    epoch: int = 0
    refused: bool = False


class PinBlocks(Message, frozen=True):
    """A remote puller wants `ids` (prefix order). may_wait: the answer may wait until the first of them is computed."""

    key: int
    ids: bytes
    may_wait: bool = False


class PinnedSlots(Message, frozen=True):
    """Answer to PinBlocks: slots of the leading blocks that are here, pinned until Unpin of the same key."""

    key: int
    slots: list[int]


class Unpin(Message, frozen=True):
    """The remote pull of `key` has ended."""

    key: int


class MoverReady(Message, frozen=True):
    """The pull endpoint listens; transport is "ucx" or "grpc"."""

    pull_address: str
    grpc_address: str
    transport: str


class NodeFailing(Message, frozen=True):
    """Pulls from or pushes to a kvstore node failed repeatedly; sent again while they do."""

    location_id: str
    epoch: int


class MoverCounters(Message, frozen=True):
    """Totals since start and, in the last three, what is under way; once a second."""

    pulled_blocks: int
    pulled_bytes: int
    failed_pulls: int
    verification_failures: int
    pushed_blocks: int
    dropped_pushes: int
    served_blocks: int
    bytes_by_transport: dict[str, int] = msgspec.field(default_factory=dict)
    running_pulls: int = 0
    queued_pushes: int = 0
    open_leases: int = 0


FromEngineToMover = PullBlocks | CancelPull | PushBlocks | PinnedSlots
FromMoverToEngine = PullDone | PullCut | PushDone | PinBlocks | Unpin
FromMoverToFront = MoverReady | MoverCounters | NodeFailing
