"""When a chain is hot, whom its copies go to, and that both end."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from services.common.blocks import BlockId
from services.kvstore.demand import MAX_TRACKED, CopyPlan, Demand
from services.kvstore.pace import Pace
from tests.common.transfer.blocks import chain


def test_the_hot_part_is_the_common_prefix() -> None:
    demand = Demand(leases=5, window_s=10.0)
    ids = chain(8)
    assert [demand.note(ids[: 8 - n], 0.0) for n in range(4)] == [0, 0, 0, 0]
    assert demand.note(ids[:3], 0.0) == 3
    assert demand.note(ids, 0.0) == 5


def test_slow_demand_is_none() -> None:
    demand = Demand(leases=3, window_s=10.0)
    ids = chain(1)
    assert not any(demand.note(ids, 8.0 * n) for n in range(20))
    assert [demand.note(ids, 200.0 + n) for n in range(3)] == [0, 0, 1]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12), st.floats(0, 3)), max_size=80))
def test_counts_are_those_of_the_last_half_to_full_window(pulls: list[tuple[int, int, float]]) -> None:
    demand, leases, window_s = Demand(leases=4, window_s=10.0), 4, 10.0
    chains = [chain(12, number) for number in range(4)]
    seen: list[tuple[float, BlockId]] = []
    now_s = 0.0
    for number, length, pause_s in pulls:
        now_s += pause_s
        ids = chains[number][:length]
        seen += [(now_s, block_id) for block_id in ids]
        num_hot = demand.note(ids, now_s)
        most = Counter(block_id for at_s, block_id in seen if at_s >= now_s - window_s)
        least = Counter(block_id for at_s, block_id in seen if at_s // 5.0 == now_s // 5.0)
        assert all(most[block_id] >= leases for block_id in ids[:num_hot])
        assert num_hot == length or least[ids[num_hot]] < leases


def test_memory_is_bounded_and_goes_with_the_window() -> None:
    demand = Demand(leases=2, window_s=10.0)
    for number in range(2 * MAX_TRACKED // 1000):
        demand.note([BlockId(b"%8d%8d" % (number, n)) for n in range(1000)], 0.0)
    assert len(demand) <= MAX_TRACKED
    demand.note(chain(1), 100.0)
    assert len(demand) == 1


@given(st.integers(1, 6), st.integers(1, 4))
def test_copies_of_copies_stay_with_a_bounded_set_of_nodes(num_nodes: int, limit: int) -> None:
    """Every node that holds the chain asks on as long as it may; whoever was asked holds it and asks too."""
    names = [f"n{i}" for i in range(num_nodes)]
    path = chain(3)
    plans = {name: CopyPlan(name, nodes=limit, window_s=10.0) for name in names}
    holders, asked = {"n0"}, Counter[tuple[str, str]]()
    for window in range(9):
        for name in sorted(holders):
            now_s = 11.0 * window
            if not plans[name].is_due(path[-1], now_s):
                continue
            node = plans[name].next_node(path[0], path[-1], names, now_s)
            plans[name].asked(path, node, now_s, tip=path[-1])
            if node is not None:
                asked[name, node] += 1
                holders.add(node)
    assert len(holders) <= limit + 1
    assert len(holders) >= min(limit, num_nodes)
    assert all(count == 1 for count in asked.values())
    assert all(asker != node for asker, node in asked)


def test_one_node_is_asked_a_window_and_again_only_much_later() -> None:
    plan = CopyPlan("own", nodes=3, window_s=10.0)
    names, path = ["own", "a", "b"], chain(4)
    first = plan.next_node(path[0], path[-1], names, 0.0)
    assert first is not None
    plan.asked(path, first, 0.0, tip=path[-1])
    assert all(not plan.is_due(block_id, 9.9) for block_id in path), "a part of the chain is no other chain"
    assert plan.is_due(path[-1], 10.0)
    second = plan.next_node(path[0], path[-1], names, 10.0)
    assert second != first
    plan.asked(path, second, 10.0, tip=path[-1])
    plan.asked(path, None, 20.0, tip=path[-1])
    assert plan.next_node(path[0], path[-1], names, 99.0) is None
    assert plan.next_node(path[0], path[-1], names, 100.0) == first


def test_a_longer_chain_is_asked_for_anew() -> None:
    plan = CopyPlan("own", nodes=3, window_s=10.0)
    ids = chain(6)
    plan.asked(ids[:4], "a", 0.0, tip=ids[3])
    assert plan.is_due(ids[5], 0.0)


def test_a_chain_of_which_only_the_beginning_is_copied_is_not_looked_for_at_every_pull() -> None:
    plan = CopyPlan("own", nodes=3, window_s=10.0)
    ids = chain(6)
    plan.asked(ids[:4], "a", 0.0, tip=ids[5])
    assert not plan.is_due(ids[5], 9.9)
    assert plan.next_node(ids[0], ids[3], ["own", "a"], 11.0) is None


@given(st.lists(st.integers(0, 5000), max_size=50))
def test_a_pace_is_kept(sizes: list[int]) -> None:
    pace, now_s = Pace(1000.0), 0.0
    for size in sizes:
        now_s += pace.wait_s(now_s)
        pace.went(size, now_s)
    assert now_s >= (sum(sizes[:-1]) / 1000.0) * (1 - 1e-9) if sizes else now_s == 0
