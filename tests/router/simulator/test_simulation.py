"""Whole runs: the real router over simulated workers."""

from __future__ import annotations

import itertools

import pytest

from services.common.links import Link
from services.router.policies import POLICIES
from services.router.simulator.lower_tiers import TierProfile
from services.router.simulator.oracle import NAME
from services.router.simulator.planner import MOST_WORKERS, NotEnoughError, find_workers
from services.router.simulator.simulation import simulate
from services.router.simulator.summary import Summary, summarise
from services.router.simulator.trace import TraceRequest
from tests.router.simulator.scenes import BLOCK, block_ids, random_trace, scenario, trace


def run(seed: int = 1, *, rate: float = 40.0, count: int = 150, **fields: object) -> Summary:
    requests = random_trace(seed, count, rate=rate)
    config = scenario(**fields)
    return summarise(config, requests, *simulate(config, requests))


@pytest.mark.parametrize("policy", [*POLICIES, NAME])
def test_every_request_ends_once(policy: str) -> None:
    requests = random_trace(2, 150, rate=80.0)
    outcomes, workers = simulate(scenario(policy=policy), requests)
    assert all((outcome.ended_s >= 0) != outcome.refused for outcome in outcomes)
    served = [outcome for outcome in outcomes if not outcome.refused]
    assert all(outcome.arrived_s < outcome.first_token_s <= outcome.ended_s for outcome in served)
    assert all(worker.is_idle for worker in workers)


def test_the_same_seed_gives_the_same_figures_and_another_one_others() -> None:
    assert run(seed=3) == run(seed=3)
    assert run(seed=3) != run(seed=4)


def test_following_the_cache_beats_taking_turns_where_prefixes_are_shared() -> None:
    by_cache, in_turns = run(rate=60.0), run(rate=60.0, policy="round_robin")
    assert by_cache.hit_rate > in_turns.hit_rate
    assert by_cache.ttft_mean_s < in_turns.ttft_mean_s
    assert by_cache.hit_rate_of_ideal <= 1.0


def test_overload_is_bounded_by_refusals_which_are_misses() -> None:
    summary = run(rate=2000.0, count=600, max_queue_s=0.2, patience_s=0.5)
    assert summary.refused > 0
    assert summary.served + summary.refused == summary.requests
    assert summary.goodput_share <= summary.served / summary.requests


def test_a_prompt_that_fits_no_worker_is_refused_and_the_others_are_served() -> None:
    requests = trace([TraceRequest(0.0, 10_000, 5), TraceRequest(0.1, 100, 5, block_ids(1, 100 // BLOCK))])
    outcomes, _ = simulate(scenario(), requests)
    assert [outcome.refused for outcome in outcomes] == [True, False]


def test_what_lost_workers_had_is_served_by_the_others() -> None:
    requests = random_trace(5, 300, rate=60.0)
    outcomes, workers = simulate(scenario(lost_workers=2), requests)
    assert all(outcome.ended_s >= 0 for outcome in outcomes)
    assert sum(outcome.attempts for outcome in outcomes) > len(outcomes)
    last = requests.requests[len(requests.requests) // 2].arrival_s
    late = {outcome.worker for outcome in outcomes if outcome.arrived_s > last + 2.0}
    assert len(late) == 2
    assert len(workers) == 4


LOWER_TIERS = TierProfile(40_000, 400_000, Link(10e9, 0.001), Link(3e9, 0.001))


@pytest.mark.parametrize("policy", [*POLICIES, NAME])
def test_every_request_ends_once_with_lower_tiers_and_lost_workers(policy: str) -> None:
    requests = random_trace(2, 150, rate=80.0)
    outcomes, workers = simulate(scenario(policy=policy, lower_tiers=LOWER_TIERS, lost_workers=1), requests)
    assert all(outcome.ended_s >= 0 for outcome in outcomes)
    assert all(outcome.pulled_tokens <= outcome.request.prompt_tokens for outcome in outcomes)
    assert all(worker.is_idle for worker in workers)


def test_lower_tiers_give_back_what_workers_have_no_room_for() -> None:
    without, with_them = run(rate=60.0), run(rate=60.0, lower_tiers=LOWER_TIERS)
    assert without.pulled_share == 0.0
    assert with_them.pulled_share > 0.05
    assert with_them.hit_rate_of_ideal > without.hit_rate_of_ideal + 0.05
    assert with_them.ttft_mean_s < without.ttft_mean_s
    assert with_them == run(rate=60.0, lower_tiers=LOWER_TIERS)


def test_links_that_are_slower_than_computing_are_not_used() -> None:
    slow = TierProfile(40_000, 400_000, Link(1e9, 0.001), Link(1e9, 0.001))
    assert run(rate=60.0, lower_tiers=slow).pulled_share == 0.0


def test_requests_of_a_session_wait_for_each_other() -> None:
    requests = trace([TraceRequest(at * 0.01, 960, 40, block_ids(1, 60), "s") for at in range(5)])
    outcomes, _ = simulate(scenario(), requests)
    for before, after in itertools.pairwise(outcomes):
        assert after.arrived_s >= before.ended_s - 0.01
    assert [outcome.cached_tokens for outcome in outcomes] == [0, 944, 944, 944, 944]


def test_the_planner_finds_the_least_number_that_is_enough() -> None:
    tried: list[int] = []

    def enough(workers: int) -> bool:
        tried.append(workers)
        return workers >= 37

    assert find_workers(enough) == 37
    assert len(tried) < 15
    with pytest.raises(NotEnoughError):
        find_workers(lambda workers: workers > MOST_WORKERS)
