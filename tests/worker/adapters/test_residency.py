"""Slots of adapters: random requests, loads, failures and ends against the rules of who may have what."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.adapters.residency import OVERTAKE_S, Load, Residency

PLENTY = 99
ADAPTERS = [bytes([number]) * 16 for number in range(5)]


def size(adapter: bytes) -> int:
    """Bytes that an adapter takes."""
    return adapter[0] + 1


class Requests:
    """Drives a Residency, and keeps the books of what it may do."""

    def __init__(self, num_slots: int, max_waiting: int, max_bytes: int) -> None:
        self.num_slots = num_slots
        self.max_bytes = max_bytes
        self.max_waiting = max_waiting
        self.residency = Residency(num_slots, max_waiting=max_waiting, max_bytes=max_bytes)
        self.now = 0.0
        self.next_key = 0
        # Size of the smallest adapter that came so far.
        self.least = 0
        # Of every request that has not ended its adapter, and of those that have a slot, which.
        self.wanted: dict[int, bytes] = {}
        self.given: dict[int, int] = {}
        self.loading: dict[int, Load] = {}
        self.loaded: dict[int, bytes] = {}

    def ask(self, adapter: bytes) -> None:
        if not self.residency.has_room(adapter):
            assert self.residency.num_waiting >= self.max_waiting
            return
        self.next_key += 1
        self.wanted[self.next_key] = adapter
        self.residency.ask(self.next_key, adapter, self.now)

    def end(self, number: int) -> None:
        if self.wanted:
            key = sorted(self.wanted)[number % len(self.wanted)]
            self.residency.release(key)
            self.residency.release(key)
            self.forget(key)

    def forget(self, key: int) -> None:
        del self.wanted[key]
        self.given.pop(key, None)

    def settle(self, number: int, *, fails: bool) -> None:
        if not self.loading:
            return
        slot = sorted(self.loading)[number % len(self.loading)]
        load = self.loading.pop(slot)
        emptied = None if fails else self.residency.make_room(size(load.digest))
        if not fails:
            self.least = min(size(load.digest), self.least or size(load.digest))
        held = {other for other in self.loaded if other in self.given.values()}
        if emptied is None and not fails:
            of_held = sum(size(self.loaded[other]) for other in held)
            assert of_held + size(load.digest) > self.max_bytes, "there would have been room"
        if emptied is not None:
            assert not held.intersection(emptied), "a held slot was emptied"
            for other in emptied:
                del self.loaded[other]
            self.loaded[slot] = load.digest
            self.residency.loaded(slot, size(load.digest))
            return
        for key in self.residency.failed(slot):
            assert self.wanted[key] == load.digest
            self.forget(key)

    def pass_time(self, seconds: float, max_wait_s: float) -> None:
        self.now += seconds
        for key in self.residency.late(self.now, max_wait_s):
            assert key not in self.given
            self.forget(key)

    def take(self) -> None:
        self.residency.serve(self.now)
        for load in self.residency.take_loads():
            assert load.slot not in self.loading
            assert load.slot not in self.given.values(), "a held slot was given away"
            assert load.digest not in [self.loaded.get(slot) for slot in range(self.num_slots) if slot != load.slot]
            self.loaded.pop(load.slot, None)
            self.loading[load.slot] = load
        for key, slot in self.residency.take_granted():
            assert key not in self.given
            assert self.loaded[slot] == self.wanted[key]
            self.given[key] = slot

    def check(self) -> None:
        assert len(self.loaded) + len(self.loading) <= self.num_slots
        assert sorted(self.residency.resident) == sorted(self.loaded.values())
        assert self.residency.resident_bytes == sum(map(size, self.loaded.values())) <= self.max_bytes
        assert self.residency.num_waiting <= max(self.max_waiting, 0)
        for key, slot in self.given.items():
            assert self.loaded[slot] == self.wanted[key]
        idle = self.num_slots - len({*self.given.values(), *self.loading})
        assert self.residency.num_idle == idle
        assert not (idle and self.residency.num_waiting), "a slot is free while somebody waits"
        held = sum(size(self.loaded[slot]) for slot in {*self.given.values()})
        free = self.max_bytes - held - len(self.loading) * self.least
        assert self.residency.num_open == (min(idle, max(0, free // self.least)) if self.least else idle)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from(ADAPTERS)),
        st.tuples(st.just("end"), st.integers(0, 99)),
        st.tuples(st.just("loaded"), st.integers(0, 99)),
        st.tuples(st.just("failed"), st.integers(0, 99)),
        st.tuples(st.just("time"), st.floats(0.0, 3.0)),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3), st.integers(0, 4), st.integers(1, 15), STEPS)
def test_nobody_loses_a_slot_and_nobody_is_forgotten(
    num_slots: int, max_waiting: int, max_bytes: int, steps: list[tuple[str, object]]
) -> None:
    requests = Requests(num_slots, max_waiting, max_bytes)
    for action, value in steps:
        match action, value:
            case "ask", bytes():
                requests.ask(value)
            case "end", int():
                requests.end(value)
            case "loaded" | "failed", int():
                requests.settle(value, fails=action == "failed")
            case "time", float():
                requests.pass_time(value, 5.0)
        requests.take()
        requests.check()
    for _ in range(len(requests.wanted) + num_slots + 1):
        while requests.loading:
            requests.settle(0, fails=False)
            requests.take()
        # All that is there has been given out: whoever is left waits for others' ends.
        for key in list(requests.given):
            requests.residency.release(key)
            requests.forget(key)
        requests.take()
    assert not requests.wanted
    assert requests.residency.is_settled


def test_the_least_recently_held_gives_way() -> None:
    requests = Requests(2, 4, PLENTY)
    for adapter in (ADAPTERS[0], ADAPTERS[1], ADAPTERS[0]):
        requests.ask(adapter)
        requests.take()
        requests.settle(0, fails=False)
        requests.take()
        requests.end(0)
    requests.ask(ADAPTERS[2])
    requests.take()
    requests.settle(0, fails=False)
    assert set(requests.residency.resident) == {ADAPTERS[0], ADAPTERS[2]}
    assert requests.residency.evictions == 1


def test_what_cannot_be_loaded_drives_out_one_other_at_most() -> None:
    requests = Requests(3, 4, PLENTY)
    for adapter in ADAPTERS[:3]:
        requests.ask(adapter)
        requests.take()
        requests.settle(0, fails=False)
        requests.take()
        requests.end(0)
    for _ in range(4):
        requests.ask(ADAPTERS[3])
        requests.take()
        requests.settle(0, fails=True)
    assert set(requests.residency.resident) == {ADAPTERS[1], ADAPTERS[2]}
    assert requests.residency.evictions == 1


def test_who_has_an_adapter_overtakes_for_a_while_only() -> None:
    requests = Requests(1, 4, PLENTY)
    requests.ask(ADAPTERS[0])
    requests.take()
    requests.settle(0, fails=False)
    requests.take()
    requests.ask(ADAPTERS[1])
    requests.ask(ADAPTERS[0])
    requests.take()
    assert len(requests.given) == 2
    requests.now += OVERTAKE_S + 0.1
    requests.ask(ADAPTERS[0])
    requests.take()
    assert len(requests.given) == 2
    for _ in range(2):
        requests.end(sorted(requests.wanted).index(min(requests.given)))
        requests.take()
    assert [load.digest for load in requests.loading.values()] == [ADAPTERS[1]]


def test_idle_adapters_make_room_for_a_large_one_and_held_ones_do_not() -> None:
    requests = Requests(4, 4, max_bytes=7)
    for adapter in ADAPTERS[:3]:
        requests.ask(adapter)
        requests.take()
        requests.settle(0, fails=False)
        requests.take()
    requests.end(0)
    requests.end(0)
    requests.ask(ADAPTERS[4])
    requests.take()
    requests.settle(0, fails=False)
    assert set(requests.residency.resident) == set(ADAPTERS[:3]), "3 bytes are held and 5 wanted, of 7"
    assert list(requests.wanted.values()) == [ADAPTERS[2]]
    requests.end(0)
    requests.ask(ADAPTERS[4])
    requests.take()
    requests.settle(0, fails=False)
    assert requests.residency.resident == [ADAPTERS[4]]
    assert requests.residency.evictions == 3
