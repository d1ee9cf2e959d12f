"""Which node a worker pushes to, as nodes come, grow, fail, and come back."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from services.common.registry import LocationRecord
from services.worker.push_target import FIRST_PAUSE_S, MAX_PAUSE_S, NO_TARGET, PushTargets

RAMP_S = 60.0
NOW_S = 1_000_000.0


def node(name: str, host: str = "", *, epoch: int = 1, age_s: float = 10 * RAMP_S) -> LocationRecord:
    return LocationRecord(
        kind="kvstore",
        id=name,
        epoch=epoch,
        host=host or f"host of {name}",
        grpc_address=f"{name}:1",
        pull_address=f"{name}:2",
        started_s=int(NOW_S - age_s),
    )


def targets(worker: str = "w", host: str = "h") -> PushTargets:
    return PushTargets(worker_id=worker, host=host, ramp_s=RAMP_S)


def choices(nodes: list[LocationRecord], now_s: float = NOW_S, *, workers: int = 64, host: str = "h") -> dict[str, str]:
    """The choice of each of many workers that do not talk to each other."""
    return {f"w{i}": targets(f"w{i}", host).choose(nodes, now_s).location_id for i in range(workers)}


def test_without_nodes_there_is_no_target() -> None:
    worker = LocationRecord(kind="worker", id="x", epoch=1, host="h", grpc_address="x:1")
    assert targets().choose([worker], NOW_S) == NO_TARGET


def test_the_own_host_is_preferred_and_a_node_that_leaves_moves_only_its_own() -> None:
    nodes = [node(f"n{i}") for i in range(4)]
    assert set(choices(nodes, host="host of n2").values()) == {"n2"}
    before, after = choices(nodes), choices(nodes[:3])
    assert len(set(before.values())) == 4
    assert all(after[w] == before[w] for w in before if before[w] != "n3")


@given(st.lists(st.floats(0, RAMP_S), min_size=2, max_size=6).map(sorted))
def test_a_young_node_draws_ever_more_workers_and_loses_none(ages_s: list[float]) -> None:
    old = [node(f"n{i}") for i in range(3)]
    earlier: set[str] = set()
    for age_s in ages_s:
        chosen = choices([*old, node("young", age_s=0)], NOW_S + age_s)
        drawn = {worker for worker, name in chosen.items() if name == "young"}
        assert earlier <= drawn
        earlier = drawn


def test_a_young_node_begins_small_and_ends_with_its_share() -> None:
    nodes = [node("old"), node("young", age_s=0)]
    first = Counter(choices(nodes, workers=400).values())
    last = Counter(choices(nodes, NOW_S + RAMP_S, workers=400).values())
    assert first["young"] < 0.15 * 400
    assert 0.4 * 400 < last["young"] < 0.6 * 400


def test_a_young_node_of_the_own_host_gets_the_hosts_workers_by_and_by() -> None:
    nodes = [node("far"), node("near", "h", age_s=0)]
    shares = [Counter(choices(nodes, NOW_S + age_s).values())["near"] for age_s in (0, 15, 30, 60)]
    assert shares == sorted(shares)
    assert shares[0] < 12
    assert shares[-1] == 64


def test_where_all_are_young_nobody_waits() -> None:
    nodes = [node("far", age_s=0), node("near", "h", age_s=0)]
    assert set(choices(nodes).values()) == {"near"}
    assert choices([node("only", age_s=0)])["w0"] == "only"


def test_nodes_that_start_together_are_equals_from_then_on() -> None:
    nodes = [node(f"n{i}", age_s=-i) for i in range(4)]
    settled = choices(nodes, NOW_S + 10 * RAMP_S)
    assert all(choices(nodes, NOW_S + after_s) == settled for after_s in (6, 10, 30, RAMP_S))


def test_a_failing_node_is_left_probed_and_taken_back_by_the_ramp() -> None:
    nodes = [node("a"), node("b")]
    worker = next(t for t in map(targets, map(str, range(99))) if t.choose(nodes, NOW_S).location_id == "a")
    assert worker.leave("a", 1, NOW_S)
    assert not worker.leave("a", 1, NOW_S), "told again while it is left"
    assert worker.choose(nodes, NOW_S).location_id == "b"
    assert worker.due(nodes, NOW_S) == []
    assert worker.due(nodes, NOW_S + FIRST_PAUSE_S) == [nodes[0]]
    worker.probed(nodes[0], NOW_S + FIRST_PAUSE_S, alive=False)
    assert worker.due(nodes, NOW_S + FIRST_PAUSE_S) == []
    back_s = NOW_S + 2 * FIRST_PAUSE_S
    assert worker.due(nodes, back_s) == [nodes[0]]
    worker.probed(nodes[0], back_s, alive=True)
    assert worker.choose(nodes, back_s + RAMP_S).location_id == "a"


def test_a_node_that_keeps_failing_is_probed_ever_later() -> None:
    nodes, worker, now_s = [node("a")], targets(), NOW_S
    pauses = []
    for _ in range(8):
        assert worker.leave("a", 1, now_s)
        assert worker.choose(nodes, now_s) == NO_TARGET
        pause_s = 0.0
        while not worker.due(nodes, now_s + pause_s):
            pause_s += 0.5
        pauses.append(pause_s)
        now_s += pause_s
        worker.probed(nodes[0], now_s, alive=True)
        now_s += 1
    assert pauses == [1, 2, 4, 8, 16, 32, MAX_PAUSE_S, MAX_PAUSE_S]
    now_s += 2 * MAX_PAUSE_S
    assert worker.leave("a", 1, now_s)
    assert worker.due(nodes, now_s + FIRST_PAUSE_S) == nodes


def test_a_node_that_started_anew_is_not_left_and_what_is_gone_is_forgotten() -> None:
    worker = targets()
    worker.leave("a", 1, NOW_S)
    assert worker.choose([node("a")], NOW_S) == NO_TARGET
    assert worker.choose([node("a", epoch=2)], NOW_S).epoch == 2
    worker.leave("a", 2, NOW_S)
    assert worker.choose([], NOW_S) == NO_TARGET
    assert worker.choose([node("a", epoch=2)], NOW_S).location_id == "a"
