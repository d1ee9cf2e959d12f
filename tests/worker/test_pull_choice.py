"""Move or recompute at the worker: what is kept of a plan, and what a slow link may cost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.link_messages import RunTiming
from services.worker.link_rates import LinkRates
from services.worker.messages import HolderRun
from services.worker.pull_choice import HELD_WORTH, PullChoice, choose_pull

BLOCK = 400_000


def plan_of(sizes: list[tuple[int, int]]) -> list[HolderRun]:
    """Runs of (blocks in memory, blocks on the SSD), each at a holder of its own."""
    runs, first = [], 0
    for number, (memory, ssd) in enumerate(sizes):
        runs.append(HolderRun("kvstore", f"n{number}", 1, "a", "b", first, memory + ssd, ssd))
        first += memory + ssd
    return runs


sizes = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).filter(any), min_size=1, max_size=4)
timings = st.builds(
    lambda blocks, first, rest, outcome: RunTiming(blocks, 0, first, first + rest, outcome),
    st.integers(1, 50),
    st.floats(1e-4, 1.0),
    st.floats(1e-4, 2.0),
    st.sampled_from(["ok", "short", "late", "failed"]),
)


@given(sizes, st.lists(timings, max_size=6), st.floats(1e-4, 0.1))
def test_a_pull_is_never_chosen_when_it_is_predicted_slower(
    runs: list[tuple[int, int]], past: list[RunTiming], block_compute_s: float
) -> None:
    links, plan = LinkRates(BLOCK), plan_of(runs)
    for number, timing in enumerate(past):
        links.observe([plan[number % len(plan)]], [timing], 0.0)
    choice = choose_pull(plan, links, block_compute_s=block_compute_s, now=0.0)
    count = sum(run.num_blocks for run in choice.runs)
    assert choice.compute_s == pytest.approx(count * block_compute_s)
    assert choice.pull_s < choice.compute_s or not choice.runs
    assert choice.patience_s <= choice.compute_s
    # It is the gapless beginning of the plan, and no other beginning is forecast to be better.
    assert [run.first_block for run in choice.runs] == [run.first_block for run in plan[: len(choice.runs)]]
    everything = [block for run in plan for block in range(run.first_block, run.first_block + run.num_blocks)]
    assert [b for r in choice.runs for b in range(r.first_block, r.first_block + r.num_blocks)] == everything[:count]
    for length in range(1, len(plan) + 1):
        part = plan[:length]
        seconds = sum(forecast_s(links, run) for run in part)
        saved = sum(run.num_blocks for run in part) * block_compute_s - seconds
        assert saved <= choice.compute_s - choice.pull_s + 1e-9


def forecast_s(links: LinkRates, run: HolderRun) -> float:
    ssd_s = links.ssd(run, 0.0).seconds(run.num_ssd_blocks * BLOCK) if run.num_ssd_blocks else 0.0
    return links.memory(run, 0.0).seconds((run.num_blocks - run.num_ssd_blocks) * BLOCK) + ssd_s


@given(st.integers(2, 200), st.floats(1e-4, 0.1), st.floats(1e-4, 0.5), st.lists(st.floats(0.0, 0.5), max_size=200))
def test_a_slow_link_costs_at_most_the_patience(
    num_blocks: int, block_compute_s: float, setup_s: float, gaps: list[float]
) -> None:
    """Blocks arrive after any gaps; the pull ends when all are there, or when it lags by more than the patience."""
    choice = choose_pull(plan_of([(num_blocks, 0)]), LinkRates(BLOCK), block_compute_s=block_compute_s, now=0.0)
    if not choice.runs:
        return
    total_s = raced(choice, num_blocks, block_compute_s, setup_s, gaps)
    assert total_s <= num_blocks * block_compute_s + choice.patience_s + 1e-9
    assert total_s <= 2 * num_blocks * block_compute_s + 1e-9


def raced(choice: PullChoice, num_blocks: int, block_compute_s: float, setup_s: float, gaps: list[float]) -> float:
    """Pulling until cut, and computing the rest."""
    at_s = setup_s
    for arrived, gap in enumerate(itertools.islice(itertools.chain(gaps, itertools.repeat(100.0)), num_blocks)):
        lost_s = arrived * block_compute_s + choice.patience_s
        at_s += gap
        if at_s > lost_s:
            return lost_s + (num_blocks - arrived) * block_compute_s
    return at_s


def test_what_nobody_waits_for_is_pulled_over_slower_links_too() -> None:
    """Computing it would hold up those who run here."""
    block_compute_s, links = 0.001, LinkRates(BLOCK)
    plan = plan_of([(100, 0)])
    for _ in range(3):
        links.observe(plan, [RunTiming(100, 0, 0.002, 0.25, "ok")], 0.0)
    assert not choose_pull(plan, links, block_compute_s=block_compute_s, now=0.0).runs
    held = choose_pull(plan, links, block_compute_s=HELD_WORTH * block_compute_s, now=0.0)
    assert held.runs == plan


def test_what_is_on_a_slow_ssd_is_left_there() -> None:
    links, (run,) = LinkRates(BLOCK), plan_of([(40, 60)])
    whole = choose_pull([run], links, block_compute_s=0.008, now=0.0)
    assert [(one.num_blocks, one.num_ssd_blocks) for one in whole.runs] == [(100, 60)]
    # What is read from an SSD comes at once, late: that is no reason to give up.
    assert whole.patience_s > whole.pull_s
    for _ in range(3):
        links.observe([run], [RunTiming(40, 0, 0.002, 1.0, "late")], 0.0)
    part = choose_pull([run], links, block_compute_s=0.008, now=0.0)
    assert [(one.num_blocks, one.num_ssd_blocks) for one in part.runs] == [(40, 0)]


def test_other_pulls_from_the_same_holder_come_first() -> None:
    links, plan = LinkRates(BLOCK), plan_of([(100, 0)])
    alone = choose_pull(plan, links, block_compute_s=0.001, now=0.0)
    links.begin(plan * 3)
    behind = choose_pull(plan, links, block_compute_s=0.001, now=0.0)
    assert behind.pull_s == pytest.approx(alone.pull_s + 300 * BLOCK / 2e9)
    links.begin(plan * 2)
    assert not choose_pull(plan, links, block_compute_s=0.001, now=0.0).runs
