"""Staged transfers against a pool, a staging area and a mover made of dictionaries, copies done as late as allowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.common.blocks import BlockId, join_ids, split_ids
from services.worker.messages import HolderRun, Message
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
from services.worker.staging import MAX_WAIT_S, StagedTransfers
from services.worker.staging_slots import StagingSlots, StagingUse

POOL = 40
IDS = [BlockId(number.to_bytes(16, "little")) for number in range(1, 401)]


@dataclass
class LazyCopy:
    """Done when the device gets to it."""

    source: dict[int, bytes]
    target: dict[int, bytes]
    pairs: list[tuple[int, int]]
    done: bool = False

    def is_done(self) -> bool:
        return self.done

    def run(self) -> None:
        for source, target in self.pairs:
            self.target[target] = self.source.get(source, b"nothing")
        self.done = True


@dataclass
class LazyDevice:
    """Copies as late as they may be: scatters in order, gathers after the scatters begun before them."""

    pool: dict[int, bytes] = field(default_factory=dict)
    staging: dict[int, bytes] = field(default_factory=dict)
    pending: list[LazyCopy] = field(default_factory=list)

    def gather(self, pool_slots: Sequence[int], staging_slots: Sequence[int]) -> LazyCopy:
        return self._add(LazyCopy(self.pool, self.staging, list(zip(pool_slots, staging_slots, strict=True))))

    def scatter(self, staging_slots: Sequence[int], pool_slots: Sequence[int]) -> LazyCopy:
        return self._add(LazyCopy(self.staging, self.pool, list(zip(staging_slots, pool_slots, strict=True))))

    def run(self, count: int, *, scatters_first: bool = False) -> None:
        if scatters_first:
            self.pending.sort(key=lambda copy: copy.source is self.pool)
        for copy in self.pending[:count]:
            copy.run()
        del self.pending[:count]

    def _add(self, copy: LazyCopy) -> LazyCopy:
        self.pending.append(copy)
        return copy


def pull(key: int, ids: list[bytes], slots: list[int]) -> PullBlocks:
    run_of = HolderRun("worker", "other", 1, "", "", 0, len(slots))
    return PullBlocks(key, "r", b"".join(ids), slots, [run_of], 5.0, "")


@settings(max_examples=150, stateful_step_count=60)
class StagingMachine(RuleBasedStateMachine):
    """Nothing that the mover or a step reads is ever anything but the block it is called."""

    @initialize(num_slots=st.integers(1, 12))
    def start(self, num_slots: int) -> None:
        self.now = 0.0
        self.device = LazyDevice()
        self.staged = StagedTransfers(self.device, num_slots)
        self.free = list(range(POOL))
        self.registered: dict[int, bytes] = {}
        self.next_key, self.next_id = 1, 0
        # Of the engine: slots of each transfer that is not over. Of the mover: what it was told and has not ended.
        self.pulls: dict[int, tuple[list[int], list[bytes]]] = {}
        self.cut: set[int] = set()
        self.pushes: dict[int, list[int]] = {}
        self.serves: dict[int, list[int]] = {}
        self.mover: dict[tuple[str, int], Message] = {}

    def _key(self) -> int:
        self.next_key += 1
        return self.next_key

    @rule(count=st.integers(1, 9))
    def begin_pull(self, count: int) -> None:
        if count <= len(self.free) and self.next_id + count < len(IDS):
            slots, self.free = self.free[:count], self.free[count:]
            ids = [bytes(one) for one in IDS[self.next_id : self.next_id + count]]
            self.next_id += count
            key = self._key()
            self.pulls[key] = slots, ids
            self.staged.send(pull(key, ids, slots), self.now)
            self._deliver()

    @rule(data=st.data())
    def begin_push(self, data: st.DataObject) -> None:
        slots = self._some_registered(data)
        if slots:
            key = self._key()
            self.pushes[key] = slots
            joined = b"".join(self.registered[slot] for slot in slots)
            self.staged.send(PushBlocks(key, joined, joined, slots, b"o" * 16, ""), self.now)
            self._deliver()

    @rule(data=st.data())
    def begin_serve(self, data: st.DataObject) -> None:
        slots = self._some_registered(data)
        if slots:
            key = self._key()
            self.serves[key] = slots
            self.staged.send(PinnedSlots(key, slots), self.now)
            self._deliver()

    @rule(data=st.data(), cut=st.booleans())
    def mover_ends_something(self, data: st.DataObject, cut: bool) -> None:
        if not self.mover:
            return
        name = data.draw(st.sampled_from(sorted(self.mover)))
        message = self.mover[name]
        match message:
            case PullBlocks():
                come = data.draw(st.integers(0, len(message.slots)))
                if message.key not in self.cut:
                    for slot, one in zip(message.slots[:come], split_ids(message.ids), strict=False):
                        self.device.staging[slot] = bytes(one)
                if cut and message.key not in self.cut:
                    self.cut.add(message.key)
                    self.mover[name] = pull(message.key, split_ids(message.ids)[:come], message.slots[:come])
                    self.staged.receive(PullCut(message.key, come, ["peer"] * come, []), self.now)
                else:
                    del self.mover[name]
                    come = len(message.slots) if message.key in self.cut else come
                    self.staged.receive(PullDone(message.key, come, ["peer"] * come, ""), self.now)
            case PushBlocks() | PinnedSlots():
                del self.mover[name]
                self._check_read(message)
                done = isinstance(message, PushBlocks)
                self.staged.receive(PushDone(message.key, 1) if done else Unpin(message.key), self.now)
        self._deliver()

    @precondition(lambda self: self.serves)
    @rule(data=st.data())
    def mover_gives_up_on_an_answer(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.serves)))
        self.mover.pop(("serve", key), None)
        self.staged.receive(Unpin(key), self.now)
        self._deliver()

    @precondition(lambda self: self.pulls)
    @rule(data=st.data())
    def cancel_pull(self, data: st.DataObject) -> None:
        self.staged.send(CancelPull(data.draw(st.sampled_from(sorted(self.pulls)))), self.now)
        self._deliver()

    @rule(count=st.integers(0, 3), first=st.booleans(), seconds=st.sampled_from([0.0, 0.01, 0.2, 2.0]))
    def time_passes(self, count: int, first: bool, seconds: float) -> None:
        self.device.run(count, scatters_first=first)
        self.now += seconds
        self.staged.poll(self.now)
        self._deliver()

    @rule()
    def a_step_reads_everything(self) -> None:
        self.device.run(len(self.device.pending), scatters_first=True)
        for slot, one in self.registered.items():
            assert self.device.pool[slot] == one

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        held = {slot for slots in (*self.pushes.values(), *self.serves.values()) for slot in slots}
        idle = sorted(self.registered.keys() - held)
        if idle:
            slot = data.draw(st.sampled_from(idle))
            del self.registered[slot]
            self.free.append(slot)

    @invariant()
    def slots_add_up(self) -> None:
        if hasattr(self, "staged"):
            statistics = self.staged.slots.statistics
            assert statistics.free + sum(statistics.held.values()) == self.staged.slots.num_slots

    def teardown(self) -> None:
        if not hasattr(self, "staged"):
            return
        for _ in range(200):
            for name, message in list(self.mover.items()):
                del self.mover[name]
                match message:
                    case PullBlocks():
                        come = len(message.slots) if message.key in self.cut else 0
                        self.staged.receive(PullDone(message.key, come, ["peer"] * come, ""), self.now)
                    case PushBlocks():
                        self.staged.receive(PushDone(message.key, 0), self.now)
                    case PinnedSlots():
                        self.staged.receive(Unpin(message.key), self.now)
            self.device.run(len(self.device.pending))
            self.now += max(MAX_WAIT_S.values())
            self.staged.poll(self.now)
            self._deliver()
            if self.staged.is_idle:
                break
        assert self.staged.is_idle
        assert not self.pulls
        assert not self.pushes
        # Answers that were refused have no slots, and the mover unpins them when its reader has gone.
        assert self.staged.slots.statistics.free == self.staged.slots.num_slots

    def _some_registered(self, data: st.DataObject) -> list[int]:
        count = data.draw(st.integers(1, 6))
        return sorted(self.registered)[:count]

    def _deliver(self) -> None:
        for message in self.staged.to_mover:
            match message:
                case PullBlocks():
                    assert message.slots
                    assert sum(one.num_blocks for one in message.runs) == len(message.slots) == len(message.ids) // 16
                    self.mover["pull", message.key] = message
                case PushBlocks():
                    self._check_read(message)
                    self.mover["push", message.key] = message
                case PinnedSlots():
                    self._check_read(message)
                    if message.slots and message.key in self.serves:
                        self.mover["serve", message.key] = message
        self.staged.to_mover.clear()
        told, self.staged.to_core[:] = list(self.staged.to_core), []
        for message in told:
            match message:
                case PullCut() | PullDone():
                    slots, ids = self.pulls[message.key]
                    if not (isinstance(message, PullDone) and message.key in self.cut):
                        self.registered.update(zip(slots[: message.num_blocks], ids, strict=False))
                        self.pulls[message.key] = slots[message.num_blocks :], []
                    if isinstance(message, PullDone):
                        self.free += self.pulls.pop(message.key)[0]
                case PushDone():
                    del self.pushes[message.key]
                case Unpin():
                    del self.serves[message.key]

    def _check_read(self, message: PushBlocks | PinnedSlots) -> None:
        """What the mover reads in staging is what the engine has under these ids."""
        if isinstance(message, PushBlocks):
            expected = [bytes(one) for one in split_ids(message.ids)]
        else:
            expected = [self.registered[slot] for slot in self.serves.get(message.key, [])][: len(message.slots)]
        found = [self.device.staging[slot] for slot in message.slots]
        assert found[: len(expected)] == expected


TestStaging = StagingMachine.TestCase


def test_a_use_leaves_room_for_the_others() -> None:
    slots = StagingSlots(8)
    uses: tuple[StagingUse, ...] = ("push", "serve")
    assert [len(slots.take(use, 100)) for use in uses] == [4, 4]
    assert slots.take("pull", 1) == []
    slots.give_back("serve", [7, 6])
    assert slots.take("pull", 5) == [6, 7]


def test_giving_back_what_was_not_held_is_a_bug() -> None:
    slots = StagingSlots(2)
    taken = slots.take("pull", 1)
    with pytest.raises(AssertionError):
        slots.give_back("push", taken)


def test_a_pull_larger_than_staging_is_cut_short_and_counted() -> None:
    device = LazyDevice()
    staged = StagedTransfers(device, 4)
    ids = [bytes(one) for one in IDS[:6]]
    staged.send(pull(1, ids, list(range(6))), 0.0)
    (message,) = staged.to_mover
    assert isinstance(message, PullBlocks)
    assert (len(message.slots), message.ids) == (3, join_ids(IDS[:3]))
    assert message.runs[0].num_blocks == 3
    assert staged.short_blocks["pull"] == 3


def test_who_finds_no_room_waits_and_then_gives_up() -> None:
    staged = StagedTransfers(LazyDevice(), 4)
    ids = [bytes(one) for one in IDS[:6]]
    staged.send(pull(1, ids[:3], [0, 1, 2]), 0.0)
    staged.send(pull(2, ids[3:5], [3, 4]), 0.0)
    assert not staged.is_settled
    staged.poll(MAX_WAIT_S["pull"] / 2)
    assert staged.to_core == []
    staged.poll(MAX_WAIT_S["pull"])
    assert staged.to_core == [PullDone(2, 0, [], "no room in staging")]
    assert (staged.waits["pull"], staged.short_blocks["pull"]) == (1, 2)
    # The first one ends; the next finds room at once.
    staged.receive(PullDone(1, 0, [], ""), 1.0)
    staged.send(pull(3, ids[3:5], [3, 4]), 1.0)
    assert [message.key for message in staged.to_mover if isinstance(message, PullBlocks)] == [1, 3]


def test_an_answer_that_nobody_waits_for_holds_its_slots_until_its_copy_is_done() -> None:
    device = LazyDevice(pool={0: bytes(IDS[0])})
    staged = StagedTransfers(device, 1)
    staged.send(PinnedSlots(1, [0]), 0.0)
    staged.receive(Unpin(1), 0.0)
    # The copy still reads the pool and writes to staging.
    assert (staged.to_core, staged.slots.statistics.free) == ([], 0)
    device.run(1)
    staged.poll(0.0)
    assert (staged.to_core, staged.to_mover, staged.slots.statistics.free) == ([Unpin(1)], [], 1)


def test_a_pull_that_waits_can_be_cancelled() -> None:
    staged = StagedTransfers(LazyDevice(), 1)
    ids = [bytes(one) for one in IDS[:2]]
    staged.send(pull(1, ids[:1], [0]), 0.0)
    staged.send(pull(2, ids[1:], [1]), 0.0)
    staged.send(CancelPull(2), 0.0)
    assert staged.to_core == [PullDone(2, 0, [], "cancelled")]
    assert staged.is_settled
