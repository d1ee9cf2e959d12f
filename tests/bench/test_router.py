"""The benches of the router's index: what they look up is held, and what they judge by can fail."""

from __future__ import annotations

from bench.index_soak import Done, Drift, Sample, drifts, violations
from bench.router_index import Growth, fill, measure
from bench.router_route import measure as measure_route
from bench.router_workload import COMMON_BLOCKS, TRUNK_BLOCKS, build
from services.common.blocks import BlockId
from services.router.index.replica import Replica


def test_every_location_holds_what_the_workload_says() -> None:
    workload, replica = build(9, 9_000), Replica()
    _, entries, _ = fill(replica, workload)
    assert entries == sum(location.num_blocks for location in replica.locations.values())
    # Conversations that nobody holds at all there are none of, and one holds the whole of each.
    assert len(replica.blocks) == len(
        {id_ for held in workload.held for number, depth in held for id_ in workload.chains[number][:depth]}
    )
    for number, chain in enumerate(workload.chains):
        lengths = replica.find([BlockId(id_) for id_ in chain]).lengths(replica.blocks.num_slots)
        for location, held in enumerate(workload.held):
            least = COMMON_BLOCKS if len(held) > 1 and len(chain) > TRUNK_BLOCKS else 0
            wanted = max([depth for which, depth in held if which == number], default=least)
            assert lengths[replica.locations[f"worker/w{location}"].slot] == wanted


def test_locations_that_go_on_along_the_trunk_hold_more_of_it() -> None:
    workload, replica = build(5, 5_000), Replica()
    everybody, _, _ = fill(replica, workload)
    grow = Growth(replica, workload, everybody, 7)
    for _ in range(7):
        grow()
    lengths = replica.find([BlockId(id_) for id_ in workload.chains[-1]]).lengths(replica.blocks.num_slots)
    taken = [
        lengths[replica.locations[f"worker/w{location}"].slot] - held[-1][1]
        for location, held in enumerate(workload.held)
    ]
    assert (sum(taken), max(taken), min(taken)) == (7, 2, 1)


def test_figures_are_of_every_kind_of_lookup() -> None:
    figures = measure(4, 5_000, 3, [8, 64])
    wanted = [("conversation", 8), ("conversation", 64), ("trunk", 512), ("changing trunk", 512)]
    assert [(one.prompt, one.num_blocks) for one in figures.finds] == wanted
    assert all(0 < one.p50_us <= one.p99_us for one in figures.finds)


def test_decisions_through_grpc_are_granted() -> None:
    figures = measure_route(3, 5_000, 64, 100.0, 20)
    assert figures.granted == 20
    assert 0 < figures.p50_ms <= figures.p99_ms


def test_a_soak_fails_by_what_grew_and_by_what_differs() -> None:
    flat, grown = [Sample(100.0, 20.0, 10, 5.0)] * 9, [Sample(100.0 + at, 20.0, 10, 5.0) for at in range(9)]
    assert violations(Done(), drifts(flat)) == []
    assert violations(Done(), [Drift("router_rss_mib", 100.0, 110.0)]) == ["router_rss_mib grew from 100.0 to 110.0"]
    assert [one.after > one.before for one in drifts(grown)] == [True, False, False, False]
    assert violations(Done(held_blocks=3, indexed_blocks=2.0, divergences=1.0), []) == [
        "2 blocks in the index, 3 held",
        "1 digests differed",
    ]
