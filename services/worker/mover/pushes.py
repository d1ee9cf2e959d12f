"""Write-behind to the kvstore node. Never waited for: what cannot go now is dropped and counted.

Every PushBlocks gets exactly one PushDone, after the transport has let go of every slot. After a failure the target
rests for a moment, so that a dead node costs nothing but drops.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from services.common.blocks import BlockId, split_ids
from services.common.transfer.errors import TransferError
from services.common.transfer.header import BlockFormat, make_header
from services.common.transfer.protocol import MAX_PUSH_BLOCKS, PeerAddress, PushRequest, Transport
from services.worker.messages import PushBlocks, PushDone, PushTarget
from services.worker.mover.counters import Counters
from services.worker.mover.pool import INLINE_BYTES, SharedPool

MAX_QUEUED_PUSHES = 1024
MAX_CONCURRENT_PUSHES = 4
_MAX_BATCH_BYTES = 64 * 2**20
_REST_S = 1.0
_log = structlog.get_logger()


class Pusher:
    """Runs pushes as tasks of `group`, a few at a time."""

    def __init__(
        self,
        group: asyncio.TaskGroup,
        transport: Transport,
        pool: SharedPool,
        block_format: BlockFormat,
        counters: Counters,
        done: Callable[[PushDone], None],
        *,
        timeout_s: float,
    ) -> None:
        self._group = group
        self._transport = transport
        self._pool = pool
        self._format = block_format
        self._counters = counters
        self._done = done
        self._timeout_s = timeout_s
        self._target: PushTarget | None = None
        self._rests_until_s = 0.0
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_PUSHES)
        # Pushes without a PushDone yet.
        self._num_queued = 0

    def set_target(self, target: PushTarget) -> None:
        """Push there from now on; an empty location id means nowhere."""
        self._target = target if target.location_id else None
        self._rests_until_s = 0.0
        _log.info("push target", kvstore_id=target.location_id)

    def start(self, message: PushBlocks) -> None:
        """Begin or drop a push."""
        if self._num_queued >= MAX_QUEUED_PUSHES:
            self._finish(message, 0, len(message.slots))
            return
        self._num_queued += 1
        self._group.create_task(self._run(message))

    async def _run(self, message: PushBlocks) -> None:
        accepted = 0
        try:
            async with self._slots:
                accepted = await self._push_batches(message)
        except (TransferError, ValueError, IndexError) as error:
            self._rests_until_s = time.monotonic() + _REST_S
            _log.warning("a push failed", blocks=len(message.slots), error=f"{type(error).__name__}: {error}")
        finally:
            self._num_queued -= 1
            self._finish(message, accepted, len(message.slots) - accepted)

    async def _push_batches(self, message: PushBlocks) -> int:
        ids, parents = split_ids(message.ids), split_ids(message.parents)
        if not len(ids) == len(parents) == len(message.slots):
            raise ValueError("ids, parents and slots of a push differ in number")
        step = max(1, min(MAX_PUSH_BLOCKS, _MAX_BATCH_BYTES // self._pool.block_bytes))
        accepted = 0
        for first in range(0, len(ids), step):
            target = self._target
            if target is None or time.monotonic() < self._rests_until_s:
                break
            batch = range(first, min(first + step, len(ids)))
            kept = await self._push(message, ids, parents, batch, target)
            accepted += kept
            if kept < len(batch):
                break
        return accepted

    async def _push(
        self, message: PushBlocks, ids: list[BlockId], parents: list[BlockId], batch: range, target: PushTarget
    ) -> int:
        payloads = [self._pool.slot(message.slots[i]) for i in batch]

        def headers() -> list[bytes]:
            return [
                make_header(
                    self._format,
                    ids[i],
                    payload,
                    parent_id=parents[i],
                    owner_digest=message.owner_digest,
                    starts_chain=message.starts_chain and i == 0,
                )
                for i, payload in zip(batch, payloads, strict=True)
            ]

        inline = len(batch) * self._pool.block_bytes <= INLINE_BYTES
        encoded = headers() if inline else await asyncio.to_thread(headers)
        result = await self._transport.push(
            PeerAddress(target.pull_address, target.grpc_address),
            PushRequest(encoded, payloads, target.epoch, self._timeout_s, message.traceparent),
        )
        return result.accepted

    def _finish(self, message: PushBlocks, accepted: int, dropped: int) -> None:
        self._counters.pushed_blocks += accepted
        self._counters.dropped_pushes += dropped
        self._done(PushDone(message.key, accepted))
