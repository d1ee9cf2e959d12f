"""Control messages of the UCX and the shared-memory transport, and the proofs of their handshake.

A connection begins Hello ▸ Challenge ▸ Proof ▸ Welcome: both sides prove the mesh secret over both nonces. Over UCX
these are stream messages of FRAME_BYTES, which it delivers by connection; from then on everything travels by tag,
control messages under one tag for each direction and payloads under a tag each. Tags are derived from secret and
nonces, so that only the two ends of a connection can name the buffers posted for it. Over shared memory, messages
say where payloads lie, and the reader says when it has taken them. Messages are msgpack behind their length.
"""

from __future__ import annotations

import hmac
import math
import struct
from collections.abc import Iterator, Sequence
from hashlib import sha256

import msgspec

from services.common.blocks import BLOCK_ID_BYTES, BlockId, join_ids, split_ids
from services.common.transfer.errors import ProtocolViolation
from services.common.transfer.heads import HeadRange
from services.common.transfer.protocol import MAX_PULL_BLOCKS, MAX_WAITING_PULL_S, PullRequest

NONCE_BYTES = 16
FRAME_BYTES = 192
MAX_CONTROL_BYTES = 128 * 1024
_LENGTH = struct.Struct("<I")
_TAG_COUNTER_BITS = 24
# Longest time that a read of shown memory can be said to have taken.
_MAX_READ_S = 3600.0

# Region, offset and size of a payload in memory that the sender shows.
Place = tuple[int, int, int]


class Control(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all control messages. `op` is chosen by the side that starts an operation."""


class Hello(Control, frozen=True):
    """First message, from the connecting side."""

    version: int
    nonce: bytes


class Challenge(Control, frozen=True):
    """The listening side's nonce, and its proof."""

    version: int
    nonce: bytes
    proof: bytes


class Proof(Control, frozen=True):
    """The connecting side's proof."""

    proof: bytes


class Welcome(Control, frozen=True):
    """The handshake is over."""


class Refused(Control, frozen=True):
    """The handshake failed; the connection closes."""

    reason: str


class Pull(Control, frozen=True):
    """Fields of PullRequest; ids are concatenated, heads are first and count.

    runs: how many buffers, one after the other, adjoin in memory. Holders of an older release read no wait_s, which
    pullers of an older one do not send.
    """

    op: int
    ids: bytes
    epoch: int
    deadline_s: float
    traceparent: str
    request_id: str
    runs: list[int] = []
    heads: tuple[int, int] | None = None
    wait_s: float = 0.0

    @classmethod
    def of(cls, op: int, request: PullRequest, runs: Sequence[int] = ()) -> Pull:
        """The message that asks for `request`."""
        ids, heads = join_ids(request.ids), _fields(request.heads)
        context = request.traceparent, request.request_id
        return cls(op, ids, request.epoch, request.deadline_s, *context, list(runs), heads, request.wait_s)

    def request(self, max_operation_s: float) -> PullRequest:
        """What is asked for, in the time that its holder gives. Raises ProtocolViolation."""
        wait_s = bounded_s(self.wait_s, MAX_WAITING_PULL_S)
        deadline_s = bounded_s(self.deadline_s, MAX_WAITING_PULL_S if wait_s else max_operation_s)
        ids, heads = _ids(self.ids), _heads(self.heads)
        return PullRequest(ids, self.epoch, deadline_s, self.traceparent, self.request_id, heads, wait_s=wait_s)


class Blocks(Control, frozen=True):
    """The next blocks of a pull, `first` on: their payloads follow under `tag`, `tag + 1`, …

    stop: when these are the last ones, what PullEnd would say, which is then not sent. groups: how many blocks each
    payload message takes, one each when it is empty.
    """

    op: int
    first: int
    tag: int
    headers: list[bytes]
    tiers: list[str]
    stop: str | None = None
    groups: list[int] = []


class PullEnd(Control, frozen=True):
    """`num_blocks` were sent in all."""

    op: int
    num_blocks: int
    stop: str


class Cancel(Control, frozen=True):
    """Announce no more blocks of a pull, and end it."""

    op: int


class Offer(Control, frozen=True):
    """Headers of a push."""

    op: int
    headers: list[bytes]
    epoch: int
    deadline_s: float
    traceparent: str


class Accept(Control, frozen=True):
    """Buffers for `num_blocks` of an offer, `first` on, are posted under `tag`, `tag + 1`, …; those before are held."""

    op: int
    first: int
    num_blocks: int
    tag: int


class PushEnd(Control, frozen=True):
    """A push is over."""

    op: int
    accepted: int


class Regions(Control, frozen=True):
    """Descriptors of this many regions come with the message; has_directory: the last one is a directory of blocks."""

    count: int
    has_directory: bool = False


class Lent(Control, frozen=True):
    """The next blocks of a pull over shared memory, `first` on, and where they lie; `stop` as in Blocks.

    They stay unchanged until they are taken, or `lease_s` after the pull was sent.
    """

    op: int
    first: int
    headers: list[bytes]
    tiers: list[str]
    places: list[Place]
    lease_s: float
    stop: str | None = None


class Taken(Control, frozen=True):
    """The first `num_blocks` of a pull have been copied out."""

    op: int
    num_blocks: int


class WasRead(Control, frozen=True):
    """Blocks, by their concatenated ids, that were copied out of shown memory without a pull, and what for."""

    ids: bytes
    duration_s: float
    traceparent: str
    request_id: str
    heads: tuple[int, int] | None = None

    @classmethod
    def of(cls, request: PullRequest, num_blocks: int, duration_s: float) -> WasRead:
        """The message that tells of the leading blocks of `request`."""
        ids, heads = join_ids(request.ids[:num_blocks]), _fields(request.heads)
        return cls(ids, duration_s, request.traceparent, request.request_id, heads)

    def joined(self, other: WasRead) -> WasRead | None:
        """Both as one, None when they are of different requests or too many blocks."""
        ids = self.ids + other.ids
        same = (self.traceparent, self.request_id, self.heads) == (other.traceparent, other.request_id, other.heads)
        if not same or len(ids) > MAX_PULL_BLOCKS * BLOCK_ID_BYTES:
            return None
        return WasRead(ids, self.duration_s + other.duration_s, self.traceparent, self.request_id, self.heads)

    def request(self) -> PullRequest:
        """The part of a pull that was read, without epoch and deadline. Raises ProtocolViolation."""
        heads = _heads(self.heads)
        return PullRequest(_ids(self.ids), 0, 0.0, self.traceparent, self.request_id, heads, same_host=True)

    @property
    def took_s(self) -> float:
        """How long it took, as far as that can be. Raises ProtocolViolation when it is no number."""
        return bounded_s(self.duration_s, _MAX_READ_S)


class ShownOffer(Control, frozen=True):
    """A push over shared memory: headers, and where the payloads lie until PushEnd."""

    op: int
    headers: list[bytes]
    places: list[Place]
    epoch: int
    deadline_s: float
    traceparent: str


class Ping(Control, frozen=True):
    """Are you there?"""


class Pong(Control, frozen=True):
    """Yes."""


ToServer = Pull | Cancel | Offer | ShownOffer | Taken | WasRead
ToClient = Blocks | Lent | PullEnd | Accept | PushEnd
AnyControl = ToServer | ToClient | Hello | Challenge | Proof | Welcome | Refused | Regions | Ping | Pong

_decoder: msgspec.msgpack.Decoder[AnyControl] = msgspec.msgpack.Decoder(AnyControl)


def encode(message: Control) -> bytes:
    """Bytes of a control message. Raises ProtocolViolation when the other end has no room for it."""
    body = msgspec.msgpack.encode(message)
    if _LENGTH.size + len(body) > MAX_CONTROL_BYTES:
        raise ProtocolViolation(f"control message of {len(body)} bytes")
    return _LENGTH.pack(len(body)) + body


def decode(data: bytes | bytearray | memoryview) -> AnyControl:
    """The message at the start of `data`. Raises ProtocolViolation."""
    try:
        (length,) = _LENGTH.unpack_from(data)
        return _decoder.decode(memoryview(data)[_LENGTH.size : _LENGTH.size + length])
    except (struct.error, msgspec.DecodeError):
        raise ProtocolViolation("not a control message") from None


def split(data: memoryview) -> Iterator[memoryview]:
    """The messages that lie one after the other in `data`. Raises ProtocolViolation."""
    while data:
        if len(data) < _LENGTH.size:
            raise ProtocolViolation("not a control message")
        size = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        yield data[:size]
        data = data[size:]


def bounded_s(said_s: float, most_s: float) -> float:
    """A peer's idea of a time, from 0 to `most_s`. Raises ProtocolViolation when it is no number."""
    if math.isnan(said_s):
        raise ProtocolViolation("a time that is no number")
    return min(max(0.0, said_s), most_s)


def _ids(data: bytes) -> list[BlockId]:
    if not 0 < len(data) <= MAX_PULL_BLOCKS * BLOCK_ID_BYTES or len(data) % BLOCK_ID_BYTES:
        raise ProtocolViolation("a pull of no or of too many blocks")
    return split_ids(data)


def _heads(fields: tuple[int, int] | None) -> HeadRange | None:
    try:
        return HeadRange(*fields) if fields else None
    except ValueError as error:
        raise ProtocolViolation(f"a pull of {error}") from None


def _fields(heads: HeadRange | None) -> tuple[int, int] | None:
    return (heads.first, heads.count) if heads else None


def proof(key: bytes, role: bytes, version: int, hello_nonce: bytes, challenge_nonce: bytes) -> bytes:
    """What shows that `role` (b"client" or b"server") knows the key in this very handshake."""
    message = b"|".join(
        (b"kvmesh pull", role, str(version).encode(), hello_nonce.hex().encode(), challenge_nonce.hex().encode())
    )
    return hmac.new(key, message, sha256).digest()


class TagSequence:
    """Tags of what one end of a connection receives: 40 secret bits and a counter; `control` is never taken."""

    def __init__(self, key: bytes, direction: bytes, hello_nonce: bytes, challenge_nonce: bytes) -> None:
        digest = proof(key, b"tags " + direction, 0, hello_nonce, challenge_nonce)
        self._base = int.from_bytes(digest[:5], "little") << _TAG_COUNTER_BITS
        self._next = 1
        self.control = self._base

    def take(self, count: int) -> int:
        """First of `count` consecutive tags."""
        if self._next + count >= 1 << _TAG_COUNTER_BITS:
            self._next = 1
        first = self._base + self._next
        self._next += count
        return first
