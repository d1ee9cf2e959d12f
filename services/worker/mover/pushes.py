"""Write-behind to the kvstore node. Never waited for: what cannot go now is dropped and counted.

Pushes run beside each other, but one that continues a chain waits for the one that brings its parent: a node takes no
block before its parent. A tensor-parallel rank offers the heads that it owns, and the node joins them with the others.

Every PushBlocks gets exactly one PushDone, after the transport has let go of every slot. After a failure the target
rests for a moment (`node_health`), so that a dead node costs nothing but drops.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from services.common.blocks import BLOCK_ID_BYTES, BlockId, split_ids
from services.common.transfer.errors import TransferError
from services.common.transfer.header import BlockFormat, make_header
from services.common.transfer.heads import HeadRange
from services.common.transfer.protocol import MAX_PUSH_BLOCKS, PeerAddress, PushRequest, Transport
from services.worker.engine_messages import PushTarget
from services.worker.mover.counters import Counters
from services.worker.mover.node_health import NodeHealth
from services.worker.mover.pool import INLINE_BYTES, SharedPool
from services.worker.mover_messages import PushBlocks, PushDone

MAX_QUEUED_PUSHES = 1024
MAX_CONCURRENT_PUSHES = 4
_MAX_BATCH_BYTES = 64 * 2**20
_log = structlog.get_logger()


@dataclass(slots=True)
class _Progress:
    """What one push has so far: where it went, blocks taken there, and whether more were refused."""

    target: PushTarget | None = None
    accepted: int = 0
    refused: bool = False


@dataclass(frozen=True, slots=True)
class PusherStatistics:
    """Pushes that wait or are under way."""

    num_queued: int


class Pusher:
    """Runs pushes as tasks of `group`, a few at a time."""

    def __init__(
        self,
        group: asyncio.TaskGroup,
        transport: Transport,
        pool: SharedPool,
        block_format: BlockFormat,
        heads: HeadRange,
        counters: Counters,
        health: NodeHealth,
        done: Callable[[PushDone], None],
        *,
        timeout_s: float,
    ) -> None:
        self._group = group
        self._transport = transport
        self._pool = pool
        self._format = block_format
        self._heads = heads
        self._counters = counters
        self._health = health
        self._done = done
        self._timeout_s = timeout_s
        self._target: PushTarget | None = None
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_PUSHES)
        # Pushes without a PushDone yet, and for each of their blocks what is set when its push is over.
        self._num_queued = 0
        self._under_way: dict[BlockId, asyncio.Event] = {}

    def statistics(self) -> PusherStatistics:
        """A snapshot."""
        return PusherStatistics(self._num_queued)

    def set_target(self, target: PushTarget) -> None:
        """Push there from now on; an empty location id means nowhere."""
        self._target = target if target.location_id else None
        _log.info("push target", kvstore_id=target.location_id)

    def start(self, message: PushBlocks) -> None:
        """Begin or drop a push."""
        if self._num_queued >= MAX_QUEUED_PUSHES:
            self._finish(message, _Progress())
            return
        self._num_queued += 1
        over = asyncio.Event()
        self._group.create_task(self._run(message, self._begin(message, over), over))

    def _begin(self, message: PushBlocks, over: asyncio.Event) -> asyncio.Event | None:
        """Note that the blocks of a push are under way. Returns what is set when its parent no longer is."""
        if len(message.ids) % BLOCK_ID_BYTES or len(message.parents) < BLOCK_ID_BYTES:
            return None
        before = self._under_way.get(BlockId(message.parents[:BLOCK_ID_BYTES]))
        self._under_way.update(dict.fromkeys(split_ids(message.ids), over))
        return before

    def _end(self, message: PushBlocks, over: asyncio.Event) -> None:
        over.set()
        for block_id in split_ids(message.ids) if len(message.ids) % BLOCK_ID_BYTES == 0 else ():
            if self._under_way.get(block_id) is over:
                del self._under_way[block_id]

    async def _run(self, message: PushBlocks, before: asyncio.Event | None, over: asyncio.Event) -> None:
        progress = _Progress()
        try:
            if before is not None:
                with contextlib.suppress(TimeoutError):
                    # Without its parent it is refused, and may be offered again.
                    async with asyncio.timeout(self._timeout_s):
                        await before.wait()
            async with self._slots:
                await self._push_batches(message, progress)
        except (TransferError, ValueError, IndexError) as error:
            if progress.target is not None and isinstance(error, TransferError):
                self._health.failed(progress.target.location_id, progress.target.epoch, time.monotonic())
            _log.warning("a push failed", blocks=len(message.slots), error=f"{type(error).__name__}: {error}")
        finally:
            self._num_queued -= 1
            self._end(message, over)
            self._finish(message, progress)

    async def _push_batches(self, message: PushBlocks, progress: _Progress) -> None:
        ids, parents = split_ids(message.ids), split_ids(message.parents)
        if not len(ids) == len(parents) == len(message.slots):
            raise ValueError("ids, parents and slots of a push differ in number")
        step = max(1, min(MAX_PUSH_BLOCKS, _MAX_BATCH_BYTES // self._pool.block_bytes))
        # One push goes to one node: its parts hang together.
        target = progress.target = self._target
        for first in range(0, len(ids), step):
            if target is None or self._health.rests(target.location_id, target.epoch, time.monotonic()):
                return
            batch = range(first, min(first + step, len(ids)))
            kept = await self._push(message, ids, parents, batch, target)
            self._health.worked(target.location_id, target.epoch)
            progress.accepted += kept
            if kept < len(batch):
                progress.refused = True
                return

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
                    heads=self._heads,
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

    def _finish(self, message: PushBlocks, progress: _Progress) -> None:
        self._counters.pushed_blocks += progress.accepted
        self._counters.dropped_pushes += len(message.slots) - progress.accepted
        target = progress.target
        node = (target.location_id, target.epoch) if target is not None else ("", 0)
        self._done(PushDone(message.key, progress.accepted, *node, progress.refused))
