"""How long blocks are under way between simulated workers and nodes, and what comes of a plan."""

from __future__ import annotations

import math

import pytest

from services.common.blocks import BlockId
from services.common.links import Link
from services.router.domain import PullRun
from services.router.simulator.lower_tiers import KV_BYTES_PER_TOKEN, LowerTiers, TierProfile
from services.router.simulator.worker import SimWorker
from tests.router.simulator.scenes import BLOCK, SMALL, block_ids

BLOCK_BYTES = BLOCK * KV_BYTES_PER_TOKEN
RAM, SSD = Link(1e9, 0.002), Link(0.5e9, 0.003)
ON_RAM_S, ON_SSD_S = BLOCK_BYTES / RAM.bytes_per_s, BLOCK_BYTES / SSD.bytes_per_s


def tiers(ram_blocks: int = 100, ssd_blocks: int = 100) -> LowerTiers:
    profile = TierProfile(ram_blocks * BLOCK, ssd_blocks * BLOCK, RAM, SSD)
    return LowerTiers(profile, BLOCK, [SimWorker(SMALL) for _ in range(2)])


def run(first: int, count: int, *, name: str = "k1") -> PullRun:
    kind = "kvstore" if name.startswith("k") else "worker"
    return PullRun(kind, name, 1, name, name, first, count)


def test_a_pull_takes_setup_and_bytes_and_waits_for_the_one_before() -> None:
    lower, ids = tiers(), block_ids(1, 10)
    lower.stores[1].use(ids)
    first, second = (lower.pull([run(2, 8)], ids, 5.0) for _ in range(2))
    assert (first.end, second.end) == (10, 10)
    assert first.end_s == pytest.approx(5.0 + RAM.setup_s + 8 * ON_RAM_S)
    assert second.end_s == pytest.approx(first.end_s + 8 * ON_RAM_S)


def test_an_ssd_adds_its_setup_and_its_time_and_what_was_read_is_in_memory() -> None:
    lower, ids = tiers(ram_blocks=4), block_ids(1, 10)
    lower.stores[1].use(ids)
    cold = lower.pull([run(0, 10)], ids, 0.0)
    assert cold.end_s == pytest.approx(RAM.setup_s + 4 * ON_RAM_S + SSD.setup_s + 6 * ON_SSD_S)
    roomy, ids = tiers(), block_ids(1, 4)
    roomy.stores[1].use(ids)
    assert roomy.pull([run(0, 4)], ids, 0.0).end_s == pytest.approx(RAM.setup_s + 4 * ON_RAM_S)


def test_a_holder_that_has_lost_blocks_stops_short_and_ends_the_plan() -> None:
    lower, ids = tiers(), block_ids(1, 10)
    lower.stores[1].use(ids[:4])
    lower.stores[0].use(ids)
    pull = lower.pull([run(1, 5), run(6, 4, name="k0")], ids, 0.0)
    assert pull.end == 4
    assert pull.end_s == pytest.approx(RAM.setup_s + 3 * ON_RAM_S)
    assert lower.pull([run(3, 5, name="w1")], ids, 0.0).end == 3


def test_the_runs_of_a_plan_follow_each_other() -> None:
    lower, ids = tiers(), block_ids(1, 10)
    lower.stores[1].use(ids[:4])
    lower.stores[0].use(ids)
    pull = lower.pull([run(0, 4), run(4, 6, name="k0")], ids, 0.0)
    assert pull.end == 10
    assert pull.end_s == pytest.approx(2 * RAM.setup_s + 10 * ON_RAM_S)


def test_write_behind_sends_what_is_missing_in_order_and_leaves_out_what_would_lag() -> None:
    lower, ids = tiers(ram_blocks=2000), block_ids(1, 1000)
    there_s = lower.write(0, ids[:4], 1.0)
    assert there_s == pytest.approx(1.0 + 4 * ON_RAM_S)
    lower.stores[0].use(ids[:4])
    assert lower.write(0, ids[:4], 2.0) == math.inf
    assert lower.write(0, ids, 2.0) == pytest.approx(2.0 + 996 * ON_RAM_S)
    assert lower.write(0, block_ids(2, 1), 2.0) == math.inf
    assert lower.write(1, block_ids(2, 1), 2.0) == pytest.approx(2.0 + ON_RAM_S)


def test_what_a_pull_brings_is_found_and_never_takes_more_than_there_is() -> None:
    worker = SimWorker(SMALL)
    ids: tuple[BlockId, ...] = block_ids(1, worker.cache.capacity + 50)
    worker.receive(ids[:20])
    assert (worker.cache.match(ids), worker.cache.idle, worker.cache.private) == (20, 20, 0)
    worker.receive(ids)
    assert worker.cache.match(ids) == worker.cache.capacity
    assert worker.cache.available == worker.cache.capacity
    adds, removes = worker.cache.take_changes()
    assert (set(adds), removes) == (worker.cache.ids(), [])
