"""What a transfer is, whatever carries it: pull and push on the client's side, a source and a sink on the server's.

Two promises hold for every transport. When `pull` or `push` has returned or raised, nobody reads or writes the
buffers it was given any more: a buffer whose operation timed out is kept until the transport says that it is done.
And a peer that is dead or falls silent is an error within a second; one that never spoke, within `CONNECT_TIMEOUT_S`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.common.blocks import BlockId
from services.common.transfer.heads import HeadRange

PROTOCOL_VERSION = 1
# Most blocks of one pull and of one push; callers split longer ones.
MAX_PULL_BLOCKS = 4096
MAX_PUSH_BLOCKS = 64
# Longest pull of blocks that are still being computed; only while some are sent are any held for it.
MAX_WAITING_PULL_S = 120.0
# A heartbeat goes out this often while something is under way; this many without an answer mean that the peer is lost.
HEARTBEAT_S = 0.2
SILENT_HEARTBEATS = 4
# Longest wait for a connection and its handshake: what both sides compute for it takes a busy machine over a second.
CONNECT_TIMEOUT_S = 3.0
# How long a stopped pull may take to end in an orderly way before its connection is closed.
STOP_GRACE_S = 0.5

# Why an answer stopped short.
STOP_COMPLETE, STOP_MISSING, STOP_EPOCH = "", "missing", "epoch"
STOP_OVERLOAD, STOP_DEADLINE, STOP_CANCELLED = "overload", "deadline", "cancelled"
# The next block is here, but not where this transport could fetch it; another one may.
STOP_ELSEWHERE = "elsewhere"
# The holder does not have the wanted heads of the next block.
STOP_HEADS = "heads"


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a holder listens; either may be empty."""

    pull_address: str
    grpc_address: str


@dataclass(frozen=True, slots=True)
class PullRequest:
    """Blocks wanted, in prefix order. epoch 0: any. deadline_s: how long the puller waits, from sending.

    heads: only these KV heads of each block, which is what the buffers have room for; None: whole blocks. wait_s: how
    long the holder may wait for a next block that it is still computing before it stops short; holders that cannot wait
    stop at once.
    """

    ids: Sequence[BlockId]
    epoch: int
    deadline_s: float
    traceparent: str = ""
    request_id: str = ""
    heads: HeadRange | None = None
    # Known on the holder's side alone, where the transport tells.
    same_host: bool = False
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PullResult:
    """How a pull ended: the first `num_blocks` arrived over `transport`; `stop` says why the rest did not."""

    num_blocks: int
    stop: str
    transport: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class PushRequest:
    """Blocks offered, in prefix order: encoded headers and the memory that holds them. epoch 0: any.

    A rank that owns some heads only offers those of each block; the headers say which.
    """

    headers: Sequence[bytes]
    payloads: Sequence[memoryview]
    epoch: int
    deadline_s: float
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class PushResult:
    """The first `accepted` blocks are held by the peer now; `rejected` were not kept."""

    accepted: int
    rejected: int
    transport: str = field(default="", compare=False)


# Called for each block in order, once its bytes are in its buffer: index, encoded header, tier.
OnBlock = Callable[[int, bytes, str], None]


class Transport(Protocol):
    """The client's side. Cancelling a call is allowed and keeps the promise about buffers."""

    name: str

    async def pull(
        self, peer: PeerAddress, request: PullRequest, buffers: Sequence[memoryview], on_block: OnBlock
    ) -> PullResult:
        """Fetch blocks into `buffers`, one for each id. Raises TransferError; blocks reported before it are good."""

    async def push(self, peer: PeerAddress, request: PushRequest) -> PushResult:
        """Offer blocks. Raises TransferError; the peer may then hold some of them."""

    async def close(self) -> None:
        """Close every connection."""


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """A block that a source lends: its encoded header, its bytes or those of the wanted heads, and its tier."""

    header: bytes
    payload: memoryview
    tier: str


class BlockLease(Protocol):
    """Leading blocks of a request, which stay where they are until `release`."""

    @property
    def blocks(self) -> Sequence[HeldBlock]: ...

    @property
    def stop(self) -> str:
        """Why there are fewer than asked; STOP_COMPLETE when there are not."""

    def release(self, num_sent: int, stop: str) -> None:
        """Nobody reads the blocks any more. Called exactly once."""


class BlockSource(Protocol):
    """Whoever holds blocks."""

    async def lease(self, request: PullRequest) -> BlockLease:
        """Hold the leading blocks of `request` that are here; when the first is not, wait for it up to its wait_s."""


class Reservation(Protocol):
    """Room for the leading blocks of an offer. Exactly one of `commit` and `abandon` is called."""

    @property
    def num_held(self) -> int:
        """Leading blocks that are here already and need not come."""

    @property
    def buffers(self) -> Sequence[memoryview]:
        """Of the blocks after those that are here already."""

    async def commit(self) -> int:
        """All buffers are filled: verify and keep. Returns how many leading blocks are held now."""

    def abandon(self) -> None:
        """The blocks did not come, and nobody writes the buffers any more."""


class BlockSink(Protocol):
    """Whoever keeps blocks."""

    async def reserve(self, headers: Sequence[bytes], epoch: int) -> Reservation:
        """Room for the leading blocks that would be kept; none is an empty reservation."""
