"""The fair queue: shares by weight, classes, the starvation bound, settling, and that nobody is lost or starves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.fair_queue import Entry, FairQueue, RequestClass, StarvationBound, displaced
from services.common.virtual_counters import MAX_REMEMBERED, TokenPrices, VirtualCounters

INTERACTIVE, STANDARD, BATCH = RequestClass
BOUND = StarvationBound(starve_s=10, starve_grants=20)
TENANTS = ("a", "b", "c", "d")


def queue_of(weights: dict[str, float] | None = None, bound: StarvationBound = BOUND) -> FairQueue[int]:
    return FairQueue(lambda tenant: (weights or {}).get(tenant, 1.0), bound)


def entry(tenant: str = "a", kind: RequestClass = STANDARD, cost: float = 100.0) -> Entry[int]:
    return Entry(0, tenant, kind, cost)


def push(queue: FairQueue[int], *entries: Entry[int], now_s: float = 0.0) -> list[Entry[int]]:
    for one in entries:
        queue.push(one, now_s)
    return list(entries)


def served(queue: FairQueue[int], count: int, now_s: float = 0.0) -> list[Entry[int]]:
    """Turns that were taken."""
    turns = []
    for _ in range(count):
        one = queue.pop(now_s)
        if one is not None:
            queue.take(one)
            turns.append(one)
    return turns


def test_cached_tokens_are_cheap_and_output_is_dear() -> None:
    assert TokenPrices().cost(prompt_tokens=100, output_tokens=10, cached_tokens=60) == 40 + 6 + 20


@settings(max_examples=50)
@given(
    weights=st.lists(st.floats(0.25, 8), min_size=2, max_size=4),
    costs=st.lists(st.integers(1, 500), min_size=1, max_size=7),
    error=st.floats(0.2, 3),
)
def test_under_backlog_shares_are_as_the_weights(weights: list[float], costs: list[int], error: float) -> None:
    """However wrong the estimates are: what was computed is what counts."""
    shares = dict(zip(TENANTS, weights, strict=False))
    queue = queue_of(shares)
    got = dict.fromkeys(shares, 0.0)
    for tenant in shares:
        push(queue, *(entry(tenant, cost=costs[0]) for _ in range(3)))
    dearest = max(costs) * max(1.0, error)
    for turn in range(600):
        [one] = served(queue, 1)
        computed = error * costs[turn % len(costs)]
        queue.settle(one, computed)
        got[one.tenant] += computed
        push(queue, entry(one.tenant, cost=costs[turn % len(costs)]))
    per_weight = [got[tenant] / shares[tenant] for tenant in shares]
    assert max(per_weight) - min(per_weight) <= 2 * dearest / min(weights) + 1e-6


@settings(max_examples=100)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(("push", "pop", "put_back", "remove")), st.sampled_from(TENANTS),
                  st.sampled_from(RequestClass), st.floats(0, 2)),
        max_size=80,
    )
)  # fmt: skip
def test_nobody_is_lost_and_whoever_waits_is_served(
    steps: list[tuple[str, str, RequestClass, float]],
) -> None:
    queue, now_s = queue_of(), 0.0
    waiting: set[Entry[int]] = set()
    for action, tenant, kind, pause_s in steps:
        now_s += pause_s
        if action == "push":
            waiting.update(push(queue, entry(tenant, kind), now_s=now_s))
        elif action == "remove":
            mine = next((one for one in waiting if one.tenant == tenant), None)
            if mine is not None:
                queue.remove(mine)
                waiting.discard(mine)
        else:
            popped = queue.pop(now_s)
            assert (popped is None) == (not waiting), "work conserving"
            if popped is not None and action == "pop":
                waiting.remove(popped)
            elif popped is not None:
                queue.put_back(popped)
        assert queue.num_waiting == len(waiting)
        assert queue.cost_waiting == pytest.approx(sum(one.cost for one in waiting))
        assert all(queue.num_waiting_of(t) == sum(one.tenant == t for one in waiting) for t in TENANTS)
    rest = served(queue, len(waiting) + 1, now_s)
    assert set(rest) == waiting
    assert len(rest) == len(waiting)


@settings(max_examples=50)
@given(flood=st.integers(1, 200), quiet_cost=st.floats(1, 300), noisy_cost=st.floats(1, 300))
def test_a_tenant_that_comes_to_a_flood_is_served_within_two_turns(
    flood: int, quiet_cost: float, noisy_cost: float
) -> None:
    queue = queue_of()
    push(queue, *(entry("noisy", cost=noisy_cost) for _ in range(flood + 2)))
    served(queue, flood)
    push(queue, entry("quiet", cost=quiet_cost))
    assert "quiet" in {one.tenant for one in served(queue, 2)}


def test_idle_time_is_no_credit() -> None:
    """One that was away for a thousand turns takes turns with the other, not a thousand of its own."""
    queue = queue_of()
    push(queue, *(entry("busy") for _ in range(1010)))
    served(queue, 1000)
    push(queue, *(entry("back") for _ in range(10)))
    names = [one.tenant for one in served(queue, 10)]
    assert names.count("busy") == 5


def test_an_idle_queue_is_free_and_its_next_comers_are_equal() -> None:
    queue = queue_of()
    for _ in range(50):
        push(queue, entry("alone"))
        assert len(served(queue, 1)) == 1
    push(queue, *(entry(tenant) for tenant in ("new", "alone") * 5))
    names = [one.tenant for one in served(queue, 6)]
    assert names.count("new") == 3


def test_the_urgent_go_first_and_within_a_line_the_older() -> None:
    queue = queue_of()
    batch, first, second, urgent = push(
        queue, entry(kind=BATCH), entry(kind=STANDARD), entry(kind=STANDARD), entry(kind=INTERACTIVE)
    )
    assert served(queue, 5) == [urgent, first, second, batch]


def test_a_less_urgent_class_has_every_nth_turn() -> None:
    queue = queue_of(bound=StarvationBound(starve_s=1e9, starve_grants=4))
    push(queue, *(entry(kind=INTERACTIVE) for _ in range(50)), *(entry(kind=BATCH) for _ in range(10)))
    turns = served(queue, 25)
    assert [at for at, one in enumerate(turns) if one.request_class is BATCH] == [4, 9, 14, 19, 24]
    assert all(one.asks_as is INTERACTIVE for one in turns)


@settings(max_examples=50)
@given(every_s=st.floats(0.1, 3.0))
def test_a_class_that_waits_has_a_turn_within_the_time_bound(every_s: float) -> None:
    queue = queue_of(bound=StarvationBound(starve_s=5, starve_grants=10**9))
    push(queue, *(entry(kind=kind) for kind in RequestClass for _ in range(200)))
    last = dict.fromkeys(RequestClass, 0.0)
    for turn in range(150):
        now_s = turn * every_s
        [one] = served(queue, 1, now_s)
        # Two classes may fall due at the same time, and the most urgent has every second turn.
        assert now_s - last[one.request_class] <= 5 + 4 * every_s
        last[one.request_class] = now_s
    assert all(now_s - at_s <= 5 + 4 * every_s for at_s in last.values())


def test_a_promoted_turn_that_is_put_back_stays_due() -> None:
    queue = queue_of(bound=StarvationBound(starve_s=10, starve_grants=10**9))
    push(queue, entry(kind=INTERACTIVE), entry(kind=BATCH))
    due = queue.pop(11)
    assert due is not None
    assert (due.request_class, due.asks_as) == (BATCH, INTERACTIVE)
    queue.put_back(due)
    assert queue.pop(11) is due
    lone = queue.pop(11)
    assert lone is not None
    assert lone.request_class is INTERACTIVE


def test_turns_below_a_class_only() -> None:
    queue = queue_of()
    push(queue, entry(kind=BATCH))
    assert queue.pop(0, below=BATCH) is None
    [urgent] = push(queue, entry(kind=INTERACTIVE))
    assert queue.pop(0, below=BATCH) is urgent
    assert queue.pop(0, below=INTERACTIVE) is None
    assert queue.pop(0) is not None


def test_a_turn_put_back_costs_nothing_and_keeps_its_place() -> None:
    queue = queue_of()
    first, second = push(queue, entry("a"), entry("a"))
    assert queue.pop(0) is first
    assert queue.served("a", STANDARD) == 0
    queue.put_back(first)
    assert served(queue, 1) == [first]
    assert queue.served("a", STANDARD) == 100
    queue.put_back(first)
    assert queue.served("a", STANDARD) == 0
    assert served(queue, 2) == [first, second]
    queue.give_up(first)
    assert queue.served("a", STANDARD) == 100


def test_turns_that_come_to_nothing_do_not_set_a_newcomer_back() -> None:
    queue = queue_of()
    push(queue, *(entry("noisy") for _ in range(20)))
    served(queue, 1)
    open_turns = [queue.pop(0) for _ in range(8)]
    push(queue, entry("quiet"), entry("quiet"))
    for one in open_turns:
        assert one is not None
        queue.put_back(one)
    assert [one.tenant for one in served(queue, 3)].count("quiet") == 2


def test_open_turns_are_shared_too() -> None:
    queue = queue_of()
    push(queue, *(entry(tenant) for tenant in ("a", "b") for _ in range(6)))
    open_turns = [queue.pop(0) for _ in range(6)]
    assert [one.tenant for one in open_turns if one is not None].count("a") == 3


def test_turns_put_back_in_any_order_keep_theirs() -> None:
    queue = queue_of()
    entries = push(queue, *(entry("a") for _ in range(5)))
    first, second, third = served(queue, 3)
    for one in (second, first, third):
        queue.put_back(one)
    assert served(queue, 5) == entries


def test_who_is_kept_goes_first_in_its_class() -> None:
    queue = queue_of()
    older, kept = push(queue, entry("served"), entry("served"))
    push(queue, *(entry("idle") for _ in range(3)))
    queue.remove(kept)
    kept.is_kept = True
    queue.take(entry("served", cost=1e6))
    queue.put_back(kept)
    urgent = push(queue, entry("idle", INTERACTIVE))[0]
    assert served(queue, 2) == [urgent, kept]
    queue.remove(older)


def test_who_is_kept_makes_no_room() -> None:
    queue = queue_of()
    kept, other = push(queue, entry("a", BATCH), entry("b", BATCH))
    kept.is_kept = True
    assert displaced(entry(kind=INTERACTIVE), queue, [queue], 2) is other
    queue.remove(other)
    late = entry(kind=INTERACTIVE)
    assert displaced(late, queue, [queue], 1) is late


def test_what_is_ahead_of_a_newcomer() -> None:
    queue = queue_of({"heavy": 3.0})
    push(queue, *(entry("a", cost=10) for _ in range(2)), *(entry("b", cost=10) for _ in range(9)))
    push(queue, *(entry("heavy", cost=10) for _ in range(9)), entry("c", INTERACTIVE, cost=7), entry("d", BATCH))
    assert queue.cost_ahead("a", STANDARD) == 20 + 20 + 60 + 7
    assert queue.cost_ahead("new", STANDARD) == 7
    assert queue.cost_ahead("c", INTERACTIVE) == 7


def test_room_is_made_by_the_least_urgent_newest_first() -> None:
    queue = queue_of()
    _, newest, standard = push(queue, entry(kind=BATCH), entry(kind=BATCH), entry(kind=STANDARD))
    assert displaced(entry(kind=INTERACTIVE), queue, [queue], 4) is None
    assert displaced(entry(kind=INTERACTIVE), queue, [queue], 3) is newest
    late = entry(kind=BATCH)
    assert displaced(late, queue, [queue], 3) is late
    assert standard is not newest


def test_within_a_class_the_longest_line_makes_room_by_weight() -> None:
    queue = queue_of({"heavy": 8.0})
    noisy = push(queue, *(entry("noisy") for _ in range(5)))
    push(queue, *(entry("heavy") for _ in range(8)))
    assert displaced(entry("quiet"), queue, [queue], 13) is noisy[-1]
    more = entry("noisy")
    assert displaced(more, queue, [queue], 13) is more


def test_room_is_shared_by_the_queues_of_all_models() -> None:
    busy, other = queue_of(), queue_of()
    [batch] = push(busy, entry("noisy", BATCH))
    assert displaced(entry(), other, [busy, other], 1) is batch
    alone = entry()
    assert displaced(alone, other, [queue_of(), other], 0) is alone


def test_counters_of_tenants_that_are_gone_are_forgotten() -> None:
    counters = VirtualCounters(lambda _: 1.0)
    for number in range(3 * MAX_REMEMBERED):
        counters.join(f"t{number}", ())
        counters.charge(f"t{number}", 1.0)
        counters.leave(f"t{number}")
    assert len(counters._served) <= MAX_REMEMBERED + 1
