"""Makes the copies that other nodes ask for: pulls the blocks from them, verifies and keeps them, parents first.

One chain at a time and so many bytes a second; a few chains wait, more are refused, and all are while this node is busy
serving. Copies are kept as pushed blocks are: under the owner's quota, at their real age, and not for owners that were
cleared.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from services.common.blocks import BlockId
from services.common.transfer.errors import BlockInvalid, TransferError
from services.common.transfer.header import decode_header
from services.common.transfer.protocol import PeerAddress, PullRequest, Transport
from services.kvstore.metrics import ReplicationTotals
from services.kvstore.pace import Pace
from services.kvstore.replicator import MAX_COPY_BLOCKS
from services.kvstore.reservations import StoreReservation
from services.kvstore.store import Store

_MAX_WAITING = 4
_BATCH_BLOCKS, _BATCH_BYTES = 64, 32 * 2**20
# Of one chain, and of one pull within it.
_DEADLINE_S, _PULL_TIMEOUT_S = 30.0, 5.0
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class CopyAsk:
    """A chain from its first block on, and who has it. created_s: of the oldest block, seconds since 1970."""

    headers: Sequence[bytes]
    created_s: int
    source_id: str
    source_epoch: int
    source: PeerAddress


class Copier:
    """`take` answers at once; `run` copies until cancelled."""

    def __init__(
        self,
        store: Store,
        transport: Transport,
        totals: ReplicationTotals,
        *,
        bytes_per_s: float,
        busy_leases: int,
    ) -> None:
        """bytes_per_s 0: nothing is copied."""
        self._store = store
        self._transport = transport
        self._totals = totals
        self._bytes_per_s = bytes_per_s
        self._busy_leases = busy_leases
        self._pace = Pace(max(1.0, bytes_per_s))
        self._waiting: deque[CopyAsk] = deque()
        self._wake = asyncio.Event()
        self._is_closed = False

    def take(self, ask: CopyAsk) -> tuple[int, str]:
        """How many leading blocks are here already, and why the others will not be copied; "" when it is tried.

        Raises BlockInvalid for an ask that is none.
        """
        if not 0 < len(ask.headers) <= MAX_COPY_BLOCKS or not decode_header(ask.headers[0]).starts_chain:
            raise BlockInvalid("chain")
        num_held = self._num_held(ask.headers)
        refused = self._refusal() if num_held < len(ask.headers) else ""
        if refused:
            self._totals.refused(refused)
        elif num_held < len(ask.headers):
            self._waiting.append(ask)
            self._wake.set()
        return num_held, refused

    def close(self) -> None:
        """Take and begin nothing more."""
        self._is_closed = True
        self._waiting.clear()

    async def run(self) -> None:
        """Copy what waits, one chain after another."""
        while True:
            self._wake.clear()
            while self._waiting:
                await self._copy(self._waiting.popleft())
            await self._wake.wait()

    def _refusal(self) -> str:
        if not self._bytes_per_s or self._is_closed:
            return "off"
        if len(self._waiting) >= _MAX_WAITING or self._is_busy():
            return "busy"
        return ""

    def _is_busy(self) -> bool:
        return self._store.totals.open_leases >= self._busy_leases

    def _num_held(self, headers: Sequence[bytes]) -> int:
        """Leading blocks that are here, by bisection: the set is prefix-closed."""
        low, high = 0, len(headers)
        while low < high:
            middle = (low + high) // 2
            if self._store.holds(decode_header(headers[middle]).block_id):
                low = middle + 1
            else:
                high = middle
        return low

    async def _copy(self, ask: CopyAsk) -> None:
        copied, num_bytes, error = 0, 0, ""
        try:
            async with asyncio.timeout(_DEADLINE_S):
                for batch in _batches(ask.headers):
                    blocks, size, error = await self._copy_batch(ask, batch)
                    copied, num_bytes = copied + blocks, num_bytes + size
                    if error:
                        break
        except TimeoutError:
            error = "deadline"
        except BlockInvalid as invalid:
            error = f"invalid {invalid.reason}"
        if error:
            self._totals.failed(error)
        _log.info("a chain was copied", kvstore_id=ask.source_id, blocks=copied, bytes=num_bytes, error=error)

    async def _copy_batch(self, ask: CopyAsk, headers: Sequence[bytes]) -> tuple[int, int, str]:
        """Blocks and bytes that were added, and why the chain ends here, if it does."""
        await asyncio.sleep(self._pace.wait_s(_now_s()))
        if self._is_closed or self._is_busy():
            return 0, 0, "closing" if self._is_closed else "busy"
        reservation = await self._store.reserve_copies(headers, ask.created_s)
        first, count = reservation.num_held, len(reservation.buffers)
        wanted = sum(map(len, reservation.buffers))
        self._pace.went(wanted, _now_s())
        error = await self._fill(ask, reservation, [decode_header(one).block_id for one in headers[first:][:count]])
        size = sum(map(len, reservation.buffers))
        added = await reservation.commit() - first
        if added < len(reservation.buffers):
            size, error = size * max(0, added) // max(1, len(reservation.buffers)), error or "not kept"
        self._totals.replicated(max(0, added), size)
        if not error and first + added < len(headers):
            error = "no room"
        return max(0, added), size, error

    async def _fill(self, ask: CopyAsk, reservation: StoreReservation, ids: Sequence[BlockId]) -> str:
        """Pull into the reservation and cut it to what came; why there is no more. Nothing is left to be given back."""
        arrived = 0

        def on_block(index: int, header: bytes, tier: str) -> None:
            nonlocal arrived
            arrived = index + 1

        error = ""
        try:
            if ids:
                request = PullRequest(ids, ask.source_epoch, _PULL_TIMEOUT_S)
                error = (await self._transport.pull(ask.source, request, reservation.buffers, on_block)).stop
        except TransferError as failure:
            error = type(failure).__name__
        except BaseException:
            reservation.abandon()
            raise
        reservation.keep_first(arrived)
        return error


def _batches(headers: Sequence[bytes]) -> list[Sequence[bytes]]:
    """Parts of a chain that are copied at once. Raises BlockInvalid."""
    size = max(1, decode_header(headers[0]).payload_bytes)
    step = max(1, min(_BATCH_BLOCKS, _BATCH_BYTES // size))
    return [headers[first : first + step] for first in range(0, len(headers), step)]


def _now_s() -> float:
    return asyncio.get_running_loop().time()
