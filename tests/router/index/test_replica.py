"""The replica against a naive model, under random announcements, losses, replays and resyncs."""

from __future__ import annotations

from functools import reduce
from operator import xor

from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.announced_set import AnnouncedSet, Batch
from services.common.announcements import Header, unpack_adds, unpack_xor
from services.common.blocks import BlockId, split_ids
from services.router.index.replica import Applied, Replica
from tests.router.index.contents import as_kept, held_by

CHAINS = [[BlockId(bytes([chain, at]) + bytes(14)) for at in range(12)] for chain in range(3)]
UNKNOWN = [BlockId(bytes([9, at]) + bytes(14)) for at in range(5)]


class Holder:
    """A location with its announcer, and what Redis would hold of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.epoch = 1
        self.seq = 0
        self.announced = AnnouncedSet()
        self.held: dict[BlockId, int] = {}

    def restart(self) -> None:
        self.epoch += 1
        self.seq = 0
        self.announced = AnnouncedSet()
        self.held = {}

    def add(self, chain: int, length: int, tier: int) -> None:
        ids = CHAINS[chain][:length]
        self.held.update(dict.fromkeys(ids, tier))
        self.announced.add(ids, tier)

    def remove(self, chain: int, length: int) -> None:
        """Keep `length` blocks of the chain."""
        gone = CHAINS[chain][length:][::-1]
        for id_ in gone:
            self.held.pop(id_, None)
        self.announced.remove(gone)

    def clear(self) -> None:
        self.held = {}
        self.announced.clear()

    def messages(self) -> list[tuple[Header, Batch]]:
        result = []
        while (batch := self.announced.next_batch()) is not None:
            self.seq += 1
            result.append((Header(self.epoch, self.seq, batch.kind, batch.count, batch.xor), batch))
        return result


def deliver(replica: Replica, holder: Holder, header: Header, batch: Batch) -> Applied:
    header = Header.unpack(header.pack())
    return replica.apply(holder.name, header, unpack_adds(batch.adds), split_ids(batch.removes))


def resync(replica: Replica, holder: Holder) -> None:
    replica.begin_load(holder.name, holder.epoch)
    entries = list(holder.held.items())
    replica.load_part(holder.name, entries[:3])
    replica.load_part(holder.name, entries[2:])
    replica.end_load(holder.name, holder.seq, verify_from=holder.seq)


def leading(held: dict[BlockId, int], ids: list[BlockId]) -> int:
    return next((at for at, id_ in enumerate(ids) if id_ not in held), len(ids))


def check(replica: Replica, holders: list[Holder]) -> None:
    while replica.blocks.sweep():
        pass
    for holder in holders:
        location = replica.locations.get(holder.name)
        assert (held_by(replica, holder.name) or {}) == as_kept(holder.held)
        if location:
            assert location.num_blocks == len(holder.held)
            assert location.held.xor == reduce(xor, map(unpack_xor, holder.held), 0)
    for ids in [*CHAINS, [], CHAINS[0][:1], CHAINS[1][:7], [*CHAINS[2], *UNKNOWN]]:
        lengths = replica.find(ids).lengths(replica.blocks.num_slots)
        for holder in holders:
            location = replica.locations.get(holder.name)
            assert (lengths[location.slot] if location else 0) == leading(holder.held, ids)
    assert len(replica.blocks) == len({id_ for holder in holders for id_ in holder.held})
    used = {number for part in replica.blocks._parts for number in part.values()}
    assert len(used) == replica.blocks.num_holder_sets


def act(holder: Holder, action: str, chain: int, length: int, tier: int) -> None:
    match action:
        case "add":
            holder.add(chain, length, tier)
        case "remove":
            holder.remove(chain, length)
        case "clear":
            holder.clear()
        case "restart":
            holder.restart()
        case "reannounce":
            holder.announced.announce_all()


actions = st.tuples(
    st.sampled_from(["add", "add", "add", "remove", "clear", "restart", "reannounce", "lose", "repeat", "retire"]),
    st.integers(0, 3),
    st.integers(0, 2),
    st.integers(0, 12),
    st.integers(0, 2),
)


@settings(max_examples=200)
@given(st.lists(actions, max_size=40))
def test_the_replica_equals_the_holders(steps: list[tuple[str, int, int, int, int]]) -> None:
    replica = Replica()
    holders = [Holder(f"worker/{number}") for number in range(4)]
    lost: set[str] = set()
    for action, who, chain, length, tier in steps:
        holder = holders[who]
        act(holder, action, chain, length, tier)
        if action == "retire":
            replica.retire(holder.name)
            holder.restart()
        messages = holder.messages()
        if action == "lose":
            lost.add(holder.name)
            holder.add(chain, length, tier)
            holder.messages()
            holder.add(chain, 12, 1)
            messages = holder.messages()
        results = {deliver(replica, holder, *message) for message in messages}
        if results & {Applied.GAP, Applied.DIVERGED}:
            assert holder.name in lost
            resync(replica, holder)
        if action == "repeat" or results:
            assert {deliver(replica, holder, *message) for message in messages} <= {Applied.OLD}
    for holder in holders:
        location = replica.locations.get(holder.name)
        if holder.seq and (location is None or (location.epoch, location.seq) < (holder.epoch, holder.seq)):
            resync(replica, holder)
    check(replica, holders)


def test_a_whole_set_replaces_the_old_one_only_when_it_is_complete() -> None:
    replica, holder = Replica(), Holder("worker/a")
    many = [BlockId(number.to_bytes(16, "big")) for number in range(600)]
    holder.announced.add(many, 0)
    for message in holder.messages():
        assert deliver(replica, holder, *message) is Applied.YES
    holder.announced.remove(many[500:])
    holder.messages()
    holder.announced.announce_all()
    staged = holder.messages()
    assert len(staged) == 2
    assert deliver(replica, holder, *staged[0]) is Applied.YES
    assert replica.locations["worker/a"].num_blocks == 600
    assert deliver(replica, holder, *staged[1]) is Applied.YES
    assert set(held_by(replica, "worker/a") or ()) == set(many[:500])


def test_the_end_of_a_whole_set_without_its_beginning_asks_for_a_resync() -> None:
    replica, holder = Replica(), Holder("worker/a")
    many = [BlockId(number.to_bytes(16, "big")) for number in range(600)]
    holder.announced.add(many, 0)
    messages = holder.messages()
    replica.begin_load("worker/a", 1)
    replica.end_load("worker/a", 1, verify_from=1)
    results = [deliver(replica, holder, *message) for message in messages]
    assert results == [Applied.OLD, Applied.YES, Applied.GAP]


def test_a_digest_that_differs_is_noticed() -> None:
    replica, holder = Replica(), Holder("worker/a")
    holder.add(0, 5, 0)
    (message,) = holder.messages()
    deliver(replica, holder, *message)
    replica.blocks.remove(replica.locations["worker/a"].held, CHAINS[0][4:5])
    holder.add(1, 1, 0)
    (message,) = holder.messages()
    assert deliver(replica, holder, *message) is Applied.DIVERGED


def test_changes_between_the_parts_of_a_whole_set_are_kept() -> None:
    holder = Holder("worker/a")
    many = [BlockId(number.to_bytes(16, "big")) for number in range(600)]
    holder.announced.add(many, 0)
    first = holder.announced.next_batch()
    assert first is not None
    holder.announced.remove(many[10:11])
    holder.announced.remove(many[599:])
    holder.announced.add(CHAINS[2][:1], 1)
    replica = Replica()
    holder.seq = 1
    deliver(replica, holder, Header(1, 1, first.kind, first.count, first.xor), first)
    for message in holder.messages():
        assert deliver(replica, holder, *message) is Applied.YES
    assert set(held_by(replica, "worker/a") or ()) == {*many[:10], *many[11:599], CHAINS[2][0]}
    assert len(holder.announced) == 599
    assert replica.locations["worker/a"].agrees(*holder.announced.digest)
