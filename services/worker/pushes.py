"""Write-behind to the kvstore node: which blocks go, and when. Pure; a slot is held until the mover's word.

Write-through offers each block as it is completed; what finds no room then goes when there is room again, unless the
node has refused something meanwhile. On eviction, only blocks that the pool will soon give up are offered,
`max_push_blocks` ahead of need, so what stays useful here is not written at all. Either way a block goes only after its
parent or together with it, at most `max_push_blocks` are under way, and what has left the pool before it was offered is
counted as dropped. Being pushed is no use: it does not make a block stay longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from services.common.blocks import BlockId, join_ids
from services.worker.block_pool import BlockPool
from services.worker.mover_messages import PushBlocks, PushDone
from services.worker.push_memory import Node, PushMemory
from services.worker.sequence import Request

PushPolicy = Literal["write_through", "on_eviction"]
# How often the pool is asked for what goes next.
_LOOK_EVERY_S = 0.05
# A block that the node refused so often is not offered late again, nor what hangs on it, for so long.
_MOST_REFUSALS, _REST_S = 2, 5.0


@dataclass(frozen=True, slots=True)
class _Push:
    slots: list[int]
    ids: list[BlockId]
    generation: int


@dataclass(frozen=True, slots=True)
class _Origin:
    """Of a block: whose it is, and what its chain starts from."""

    owner_digest: bytes
    block_root: BlockId


@dataclass(frozen=True, slots=True)
class _Late:
    """A block that waits for room. chain: of those that are completed together, and go together."""

    slot: int
    origin: _Origin
    traceparent: str
    chain: int


class Pushes:
    """Everything on its way to the kvstore node."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        policy: PushPolicy = "write_through",
        max_push_blocks: int = 256,
        repush_blocks_per_s: float = 256.0,
    ) -> None:
        self.dropped = 0
        self.deferred = 0
        self.memory = PushMemory(pool, repush_blocks_per_s)
        self._pool = pool
        self._policy = policy
        self._max_blocks = max_push_blocks
        self._running: dict[int, _Push] = {}
        self._keys = self._chains = 0
        self._num_blocks = 0
        # Of every block in the pool, where they are offered late.
        self._origins: dict[BlockId, _Origin] = {}
        self._looked_s = float("-inf")
        # Blocks that found no room when they were completed, where they are offered at once: after their parents.
        self._late: dict[BlockId, _Late] = {}
        # Refusals in a row of blocks in the pool that are offered late, and when they were last looked at before.
        self._refusals: dict[BlockId, tuple[int, float]] = {}

    @property
    def is_idle(self) -> bool:
        """Whether the mover holds no slot for a push."""
        return not self._running

    def set_target(self, target: Node | None, now: float) -> None:
        """Another kvstore node, or none: what was pushed is not known to be there."""
        self.memory.switch(target, now)
        self._refusals.clear()
        self._late.clear()

    def completed(self, request: Request, slot: int, now: float) -> PushBlocks | None:
        """The block in `slot` and its ancestors are registered: offer what is missing, or remember whose it is."""
        origin = _Origin(request.owner_digest, request.block_root)
        if self._policy == "on_eviction":
            self._remember(slot, origin)
            return None
        return self._push(slot, origin, now, request.traceparent)

    def due(self, now: float) -> list[PushBlocks]:
        """Offer what is to go now: what has found no room before, or what the pool gives up next."""
        if self.memory.target is None:
            return []
        return self._leaving(now) if self._policy == "on_eviction" else self._waiting(now)

    def _waiting(self, now: float) -> list[PushBlocks]:
        pushes: list[PushBlocks] = []
        while self._num_blocks < self._max_blocks and (late := self._next_late()) is not None:
            if (push := self._push(late.slot, late.origin, now, late.traceparent)) is not None:
                pushes.append(push)
        return pushes

    def _next_late(self) -> _Late | None:
        """The last block of what there is room for of the first chain that waits; those are taken out."""
        last: _Late | None = None
        room = self._max_blocks - self._num_blocks
        for block_id, late in list(self._late.items()):
            if last is not None and (late.chain != last.chain or not room):
                break
            del self._late[block_id]
            # Its place may just have been given to another, of which `forget` will tell.
            if self._pool.id_of(late.slot) == block_id:
                last, room = late, room - 1
        return last

    def _leaving(self, now: float) -> list[PushBlocks]:
        ahead = self._max_blocks - self._pool.statistics.free
        if ahead <= 0 or now - self._looked_s < _LOOK_EVERY_S:
            return []
        self._looked_s = now
        pushes: list[PushBlocks] = []
        for slot in self._pool.next_to_go(ahead):
            block_id = self._pool.id_of(slot)
            origin = self._origins.get(block_id) if block_id is not None else None
            if self._num_blocks >= self._max_blocks:
                break
            if origin is None or self._rests(slot, now):
                continue
            if (push := self._push(slot, origin, now, "")) is not None:
                pushes.append(push)
        return pushes

    def finish(self, done: PushDone) -> None:
        """Give the slots of a push back; blocks that the target did not take may be pushed again with a descendant."""
        push = self._running.pop(done.key, None)
        if push is None:
            return
        self._num_blocks -= len(push.slots)
        memory = self.memory
        if push.generation == memory.generation:
            if done.refused or (done.accepted < len(push.ids) and not done.location_id):
                # A node that is full, or rests, is not pressed with the rest.
                self._late.clear()
            # The mover learns of another target at another moment than we do.
            went_there = (done.location_id, done.epoch) == memory.target
            memory.refused(push.ids[done.accepted if went_there else 0 :])
            if went_there and self._policy == "on_eviction":
                self._note_refusals(push.ids, done)
            if went_there and done.refused and not done.accepted:
                memory.doubt_ancestors(push.slots[0])
        self._pool.release(push.slots, keep_age=True)

    def forget(self, removed: Sequence[BlockId]) -> None:
        """Blocks left the pool; what is known of them is bounded by what the pool holds."""
        if self.memory.target is not None:
            self.dropped += self.memory.count_missing(removed)
        for block_id in removed:
            self._origins.pop(block_id, None)
            self._refusals.pop(block_id, None)
            self._late.pop(block_id, None)
        self.memory.forget(removed)

    def _remember(self, slot: int, origin: _Origin) -> None:
        step: int | None = slot
        while step is not None and (block_id := self._pool.id_of(step)) is not None and block_id not in self._origins:
            self._origins[block_id] = origin
            step = self._pool.parent_of(step)

    def _note_refusals(self, ids: Sequence[BlockId], done: PushDone) -> None:
        """Once may be for want of ancestors, which then go with it; more often: no room, or the tenant was cleared."""
        for block_id in ids[: done.accepted]:
            self._refusals.pop(block_id, None)
        for block_id in ids[done.accepted :] if done.refused else ():
            self._refusals[block_id] = self._refusals.get(block_id, (0, 0.0))[0] + 1, self._looked_s

    def _rests(self, slot: int, now: float) -> bool:
        """Whether the node would not take the block in `slot`, or one before it that it lacks, a moment ago."""
        for missing in self.memory.missing(slot):
            count, refused_s = self._refusals.get(self._ids([missing])[0], (0, 0.0))
            if count >= _MOST_REFUSALS and now < refused_s + _REST_S:
                return True
        return False

    def _push(self, slot: int, origin: _Origin, now: float, traceparent: str) -> PushBlocks | None:
        """Push the block in `slot` and its ancestors that were not pushed, as far as the bounds allow."""
        if self.memory.target is None:
            return None
        missing = self.memory.missing(slot)
        room = max(0, self._max_blocks - self._num_blocks)
        slots = self.memory.take(missing[:room], now)
        self.deferred += len(slots) < min(room, len(missing))
        if self._policy == "write_through":
            ids = self._ids(missing)
            for block_id in ids:
                self._late.pop(block_id, None)
            if len(slots) == room:
                self._chains += 1
                for one, block_id in zip(missing[room:], ids[room:], strict=True):
                    self._late[block_id] = _Late(one, origin, traceparent, self._chains)
        if not slots:
            return None
        ids = self._ids(slots)
        before = self._pool.parent_of(slots[0])
        parents = [*(self._ids([before]) if before is not None else [origin.block_root]), *ids[:-1]]
        self._pool.hold(slots)
        self._num_blocks += len(slots)
        self._keys += 1
        self._running[self._keys] = _Push(slots, ids, self.memory.generation)
        joined, joined_parents = join_ids(ids), join_ids(parents)
        return PushBlocks(self._keys, joined, joined_parents, slots, origin.owner_digest, traceparent, before is None)

    def _ids(self, slots: Sequence[int]) -> list[BlockId]:
        ids = [block_id for slot in slots if (block_id := self._pool.id_of(slot)) is not None]
        assert len(ids) == len(slots), "only registered blocks are pushed"
        return ids
