"""Where the mover finds the blocks of a pool that it cannot see. Pure but for copies.

A pool on a device is not the mover's memory. What travels stops over in a staging area that is: `StagedTransfers`
exchanges pool slots for staging slots in the messages between engine and mover, and begins the copies.

At every moment: the mover is told of a block only when its copy to staging is done; the engine is told at once of a
block that has come, its copy to the pool having been begun in an order that every later step waits for; a staging slot
is free again only when neither mover nor copy uses it; a pool slot that is copied from stays held by the engine. Who
finds no room waits for a bounded time and is then served in part or not at all, which is counted: the mover ends
everything that holds slots within deadlines of its own, so nobody waits for ever.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec

from services.common.blocks import BLOCK_ID_BYTES
from services.worker.block_transfers import BlockCopier, Copy
from services.worker.messages import Message
from services.worker.mover_messages import (
    CancelPull,
    PinnedSlots,
    PullBlocks,
    PullCut,
    PullDone,
    PushBlocks,
    PushDone,
    Unpin,
)
from services.worker.staging_slots import USES, StagingSlots, StagingUse
from services.worker.transfers import runs_after

# Longest wait for room. A pull's request is kept waiting by it; a serving answer must come before the mover gives up.
MAX_WAIT_S: dict[StagingUse, float] = {"pull": 0.1, "push": 1.0, "serve": 0.5}
MAX_WAITING = 256
Staged = PullBlocks | PushBlocks | PinnedSlots


@dataclass(slots=True)
class _Held:
    """A transfer in staging. is_sent: the mover knows of it. is_over: the mover has ended it while it was copied."""

    use: StagingUse
    slots: list[int]
    pool_slots: list[int]
    is_sent: bool = False
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class _Gathering:
    """Pool to staging; then `message` goes to the mover."""

    copy: Copy
    held: _Held
    message: PushBlocks | PinnedSlots


@dataclass(frozen=True, slots=True)
class _Scattering:
    """Staging to pool; then the slots are free."""

    copy: Copy
    slots: list[int]


@dataclass(frozen=True, slots=True)
class _Waiting:
    message: Staged
    since_s: float


class StagedTransfers:
    """BlockTransfers over a staging area of `num_slots`. Keys are unique within their use."""

    def __init__(self, copier: BlockCopier, num_slots: int) -> None:
        self.to_core: list[Message] = []
        self.to_mover: list[Message] = []
        self.waits: dict[str, int] = dict.fromkeys(USES, 0)
        self.short_blocks: dict[str, int] = dict.fromkeys(USES, 0)
        self.slots = StagingSlots(num_slots)
        self._copier = copier
        self._held: dict[tuple[StagingUse, int], _Held] = {}
        self._copies: deque[_Gathering | _Scattering] = deque()
        self._waiting: dict[StagingUse, deque[_Waiting]] = {use: deque() for use in USES}

    @property
    def is_settled(self) -> bool:
        """See BlockTransfers."""
        return not self._copies and not any(self._waiting.values())

    @property
    def is_idle(self) -> bool:
        """Whether every slot is free."""
        return self.is_settled and not self._held

    def send(self, message: Message, now: float) -> None:
        """See BlockTransfers."""
        if isinstance(message, PullBlocks | PushBlocks) or (isinstance(message, PinnedSlots) and message.slots):
            self._stage(message, now)
        elif isinstance(message, CancelPull) and self._drop_waiting("pull", message.key):
            self.to_core.append(PullDone(message.key, 0, [], "cancelled"))
        else:
            self.to_mover.append(message)

    def receive(self, message: Message, now: float) -> None:
        """See BlockTransfers."""
        match message:
            case PullCut():
                self._pulled(message)
            case PullDone():
                self._pulled(message)
                held = self._held.pop(("pull", message.key), None)
                if held is not None:
                    self.slots.give_back("pull", held.slots)
            case PushDone():
                self._end("push", message.key)
            case Unpin() if self._unpinned_early(message):
                return
        self.to_core.append(message)
        self._begin_waiting(now)

    def poll(self, now: float) -> None:
        """See BlockTransfers."""
        while self._copies and self._copies[0].copy.is_done():
            done = self._copies.popleft()
            if isinstance(done, _Gathering):
                self._gathered(done)
            else:
                self.slots.give_back("pull", done.slots)
        self._begin_waiting(now)

    def _stage(self, message: Staged, now: float) -> None:
        use = _use(message)
        queue, wanted = self._waiting[use], len(message.slots)
        if not queue and self.slots.room(use) >= min(wanted, self.slots.most[use]):
            self._begin(message, 0.0)
        elif len(queue) < MAX_WAITING:
            self.waits[use] += 1
            queue.append(_Waiting(message, now))
        else:
            self._refuse(message)

    def _begin_waiting(self, now: float) -> None:
        """Begin, in order, what has room or has waited long enough."""
        for use, queue in self._waiting.items():
            while queue:
                message, waited_s = queue[0].message, now - queue[0].since_s
                enough = self.slots.room(use) >= min(len(message.slots), self.slots.most[use])
                if not enough and waited_s < MAX_WAIT_S[use]:
                    break
                queue.popleft()
                self._begin(message, waited_s)

    def _begin(self, message: Staged, waited_s: float) -> None:
        """Begin with as many blocks as have room; the leading ones, since the others need them."""
        use = _use(message)
        slots = self.slots.take(use, len(message.slots))
        if not slots:
            self._refuse(message)
            return
        self.short_blocks[use] += len(message.slots) - len(slots)
        held = self._held[use, message.key] = _Held(use, slots, message.slots[: len(slots)])
        if isinstance(message, PullBlocks):
            held.is_sent = True
            self.to_mover.append(_pull_into(message, slots, waited_s))
        else:
            copy = self._copier.gather(held.pool_slots, slots)
            self._copies.append(_Gathering(copy, held, _from_slots(message, slots)))

    def _refuse(self, message: Staged) -> None:
        """Nothing of it is transferred."""
        self.short_blocks[_use(message)] += len(message.slots)
        match message:
            case PullBlocks():
                self.to_core.append(PullDone(message.key, 0, [], "no room in staging"))
            case PushBlocks():
                self.to_core.append(PushDone(message.key, 0))
            case PinnedSlots():
                self.to_mover.append(PinnedSlots(message.key, []))

    def _gathered(self, done: _Gathering) -> None:
        held, message = done.held, done.message
        if held.is_over:
            # Only serving ends before it was answered.
            self._end(held.use, message.key)
            self.to_core.append(Unpin(message.key))
        else:
            held.is_sent = True
            self.to_mover.append(message)

    def _pulled(self, told: PullCut | PullDone) -> None:
        """Begin to copy what has come; once for each pull, since PullDone repeats what PullCut said."""
        held = self._held.get(("pull", told.key))
        if held is None or held.is_over:
            return
        held.is_over = True
        come, held.slots = held.slots[: told.num_blocks], held.slots[told.num_blocks :]
        if come:
            self._copies.append(_Scattering(self._copier.scatter(come, held.pool_slots[: len(come)]), come))

    def _unpinned_early(self, message: Unpin) -> bool:
        """Whether the engine is to hold on to the blocks until their copy is done; gives staging slots back if not."""
        held = self._held.get(("serve", message.key))
        if held is not None and not held.is_sent:
            held.is_over = True
            return True
        self._drop_waiting("serve", message.key)
        self._end("serve", message.key)
        return False

    def _end(self, use: StagingUse, key: int) -> None:
        held = self._held.pop((use, key), None)
        if held is not None:
            self.slots.give_back(use, held.slots)

    def _drop_waiting(self, use: StagingUse, key: int) -> bool:
        """Whether it waited for room."""
        queue = self._waiting[use]
        kept = [waiting for waiting in queue if waiting.message.key != key]
        dropped = len(kept) < len(queue)
        if dropped:
            queue.clear()
            queue.extend(kept)
        return dropped


def _use(message: Staged) -> StagingUse:
    match message:
        case PullBlocks():
            return "pull"
        case PushBlocks():
            return "push"
        case PinnedSlots():
            return "serve"


def _pull_into(message: PullBlocks, slots: list[int], waited_s: float) -> PullBlocks:
    """The leading part of a pull, into staging slots."""
    return msgspec.structs.replace(
        message,
        ids=message.ids[: len(slots) * BLOCK_ID_BYTES],
        slots=slots,
        runs=runs_after(message.runs, 0, len(slots)),
        deadline_s=message.deadline_s - waited_s,
    )


def _from_slots(message: PushBlocks | PinnedSlots, slots: list[int]) -> PushBlocks | PinnedSlots:
    """The leading part of a push or of an answer, out of staging slots."""
    if isinstance(message, PinnedSlots):
        return PinnedSlots(message.key, slots)
    end = len(slots) * BLOCK_ID_BYTES
    return msgspec.structs.replace(message, ids=message.ids[:end], parents=message.parents[:end], slots=slots)
