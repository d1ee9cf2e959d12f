"""Long pulls and pushes that a fault hits in the middle, and what of them is measured."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

from services.common.transfer.errors import TransferError
from services.common.transfer.protocol import PeerAddress, PullResult, PushRequest, PushResult, Transport
from tests.common.transfer.blocks import EPOCH, chain, header, payload
from tests.common.transfer.conftest import HolderProcess, shown
from tests.common.transfer.test_transports import Pulled, pull

BLOCK_BYTES = 3 * 2**18
# 66 and 36 MiB: far more than sockets and windows take in by themselves.
NUM_BLOCKS = 88
PUSH_BLOCKS = 48
# No wait for a peer may be longer: about a second, and what a busy machine adds. Pulls and pushes may take longer.
STALL_LIMIT_S = 10.0
DEADLINE_S = 60.0
# How soon the same client reaches a peer that is back.
RECOVERY_LIMIT_S = 20.0

Record = Callable[[str, object], None]


@dataclass
class Timeline:
    """When something was seen of an operation, and when it was disturbed."""

    disturbed_s: float = 0.0
    seen_s: list[float] = field(default_factory=list)

    def mark(self) -> None:
        """Something was seen now."""
        self.seen_s.append(time.monotonic())

    def disturb(self, fault: Callable[[], None]) -> None:
        """Bring the fault about."""
        fault()
        self.disturbed_s = time.monotonic()

    @property
    def longest_stall_s(self) -> float:
        """Longest time without anything, from the disturbance on."""
        times = [self.disturbed_s, *(at_s for at_s in self.seen_s if at_s > self.disturbed_s)]
        return max((after - before for before, after in itertools.pairwise(times)), default=0.0)


class LongPull(Pulled):
    """A pull of the holder's whole chain that can be disturbed after some blocks."""

    def __init__(self, count: int = NUM_BLOCKS, *, after: int = 0, fault: Callable[[], None] | None = None) -> None:
        super().__init__(chain(count), BLOCK_BYTES)
        self.timeline = Timeline()
        self.ended = False
        self._after = after
        self._fault = fault

    def on_block(self, index: int, encoded: bytes, tier: str) -> None:
        assert not self.ended
        super().on_block(index, encoded, tier)
        self.timeline.mark()
        if self._fault is not None and index + 1 == self._after:
            self.timeline.disturb(self._fault)

    async def run(self, transport: Transport, peer: PeerAddress, deadline_s: float) -> PullResult | TransferError:
        """How it ended."""
        try:
            return await pull(transport, peer, self, deadline_s=deadline_s)
        except TransferError as error:
            return error
        finally:
            self.ended = True
            self.timeline.mark()

    def assert_cut_short(self, end: PullResult | TransferError) -> None:
        """It had begun and was not over when it was disturbed; what was reported is byte for byte right."""
        arrived = len(self.headers)
        assert 0 < arrived < len(self.ids), end
        if isinstance(end, PullResult):
            assert end.num_blocks == arrived
            assert end.stop
        self.assert_good(arrived)

    def mark_buffers(self) -> bytes:
        """Take the buffers for something else; nobody may write there any more."""
        mark = b"\xa5" * len(self.memory)
        self.memory[:] = mark
        return mark


class LongPush:
    """A push of a chain of its own."""

    def __init__(self, chain_number: int, count: int = PUSH_BLOCKS) -> None:
        self.ids = chain(count, chain_number)
        data = [payload(block_id, BLOCK_BYTES) for block_id in self.ids]
        self._headers = [header(self.ids, i, block) for i, block in enumerate(data)]
        self._payloads = shown(data)
        self._digests = [blake2b(block, digest_size=16).hexdigest() for block in data]
        self.timeline = Timeline()

    def assert_kept_exactly(self, holder: HolderProcess) -> int:
        """What the holder has of it is a prefix, byte for byte; how many blocks."""
        state = holder.state()
        kept = dict(zip(state["pushed"], state["pushed_digests"], strict=True))
        mine = [kept.get(block_id.hex(), "") for block_id in self.ids]
        count = sum(map(bool, mine))
        assert mine[:count] == self._digests[:count]
        return count

    async def run(self, transport: Transport, peer: PeerAddress, deadline_s: float) -> PushResult | TransferError:
        """How it ended."""
        try:
            return await transport.push(peer, PushRequest(self._headers, self._payloads, EPOCH, deadline_s))
        except TransferError as error:
            return error
        finally:
            self.timeline.mark()


async def recovery_s(transport: Transport, peer: PeerAddress, since_s: float) -> float:
    """Seconds from `since_s` until a pull over the same client succeeds, trying again as a worker would."""
    async with asyncio.timeout(60):
        while True:
            again = LongPull(4)
            end = await again.run(transport, peer, DEADLINE_S)
            if isinstance(end, PullResult) and end.num_blocks == 4:
                again.assert_good(4)
                return time.monotonic() - since_s
            await asyncio.sleep(0.02)


def assert_in_time(record: Record, what: str, stall_s: float, recovered_s: float) -> None:
    """Nobody waited for too long, and the peer was reached soon after it was back; both are reported."""
    report(record, what, stall_s=stall_s, recovered_s=recovered_s)
    assert stall_s < STALL_LIMIT_S
    assert recovered_s < RECOVERY_LIMIT_S


def report(record: Record, what: str, **seconds: float) -> None:
    """Keep the measured times with the test's result and show them."""
    for name, value in seconds.items():
        record(name, round(value, 3))
    print(f"{what}: " + ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items()))
