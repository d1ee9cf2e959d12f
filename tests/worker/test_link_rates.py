"""What a worker learns of its links: it converges, bad news counts at once, and old bad news fades."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.links import NEAR, SSD, Link, faded
from services.worker.link_messages import RunTiming
from services.worker.link_rates import MAX_HOLDERS, LinkRates
from services.worker.messages import HolderRun

BLOCK = 400_000
HALF_LIFE_S = 30.0


def run(name: str = "n", num_blocks: int = 100, num_ssd_blocks: int = 0, epoch: int = 1) -> HolderRun:
    return HolderRun("kvstore", name, epoch, "a", "b", 0, num_blocks, num_ssd_blocks)


def timing(link: Link, num_blocks: int, *, ssd: Link | None = None, num_ssd: int = 0, outcome: str = "ok") -> RunTiming:
    """How a run goes over such links. The SSD's blocks are read before the first of all is sent."""
    ssd_s = ssd.seconds(num_ssd * BLOCK) if ssd else 0.0
    first_s = link.seconds(BLOCK) + ssd_s if num_blocks else 0.0
    return RunTiming(num_blocks, num_ssd, first_s, link.seconds((num_blocks - num_ssd) * BLOCK) + ssd_s, outcome)


def forecast_s(rates: LinkRates, now: float, num_blocks: int = 100) -> float:
    return rates.memory(run(), now).seconds(num_blocks * BLOCK)


@given(st.floats(3e6, 2e10), st.floats(0.0005, 0.5), st.integers(10, 400))
def test_a_link_is_learned_in_a_dozen_pulls(bytes_per_s: float, setup_s: float, num_blocks: int) -> None:
    link, rates = Link(bytes_per_s, setup_s), LinkRates(BLOCK)
    for number in range(12):
        rates.observe([run()], [timing(link, num_blocks)], number / 100)
    assert forecast_s(rates, 0.12, num_blocks) == pytest.approx(link.seconds(num_blocks * BLOCK), rel=0.25)


@given(st.floats(2e7, 4e9), st.floats(0.001, 0.05), st.integers(10, 400), st.integers(0, 100))
def test_an_ssd_is_learned_apart_from_its_nodes_memory(
    bytes_per_s: float, setup_s: float, num_ssd: int, num_memory: int
) -> None:
    rates, ssd = LinkRates(BLOCK), Link(bytes_per_s, setup_s)
    one = run(num_blocks=num_memory + num_ssd, num_ssd_blocks=num_ssd)
    for number in range(12):
        rates.observe([one], [timing(NEAR, num_memory + num_ssd, ssd=ssd, num_ssd=num_ssd)], number / 100)
    assert rates.memory(one, 0.12) == NEAR
    assert rates.ssd(one, 0.12).seconds(num_ssd * BLOCK) == pytest.approx(
        ssd.seconds(num_ssd * BLOCK), rel=0.3, abs=0.006
    )


def test_few_blocks_of_an_ssd_tell_of_its_latency() -> None:
    rates = LinkRates(BLOCK)
    for number in range(12):
        rates.observe([run()], [timing(NEAR, 2, ssd=Link(SSD.bytes_per_s, 0.08), num_ssd=2)], number / 100)
    assert rates.ssd(run(), 0.12).setup_s == pytest.approx(0.08, rel=0.1)
    assert rates.ssd(run(), 0.12).bytes_per_s == SSD.bytes_per_s


def test_one_hiccup_of_a_good_link_is_a_small_thing() -> None:
    rates = LinkRates(BLOCK)
    for number in range(5):
        rates.observe([run()], [timing(NEAR, 100)], number)
    rates.observe([run()], [RunTiming(100, 0, 0.002, 1.0, "ok")], 5)
    assert forecast_s(rates, 5) < 5 * NEAR.seconds(100 * BLOCK)


@pytest.mark.parametrize(
    "bad",
    [
        RunTiming(3, 0, 0.04, 0.1, "late"),
        RunTiming(0, 0, 0.0, 0.1, "late"),
        RunTiming(0, 0, 0.0, 0.01, "failed"),
        RunTiming(40, 0, 0.002, 0.8, "failed"),
    ],
    ids=["slow", "silent", "refused", "died"],
)
def test_two_bad_pulls_are_enough_for_a_second_of_computing(bad: RunTiming) -> None:
    rates = LinkRates(BLOCK)
    for number in range(5):
        rates.observe([run()], [timing(NEAR, 100)], number)
    for number in range(2):
        rates.observe([run()], [bad], 5 + number)
    assert forecast_s(rates, 7) > 1.0


def test_late_blocks_of_an_ssd_are_its_own_fault() -> None:
    rates, one = LinkRates(BLOCK), run(num_blocks=100, num_ssd_blocks=60)
    rates.observe([one], [RunTiming(40, 0, 0.002, 0.3, "late")], 0)
    rates.observe([one], [RunTiming(0, 0, 0.0, 0.3, "late")], 1)
    # Nothing came of what is in memory: that blames the memory, or its holder.
    assert rates.ssd(one, 1).bytes_per_s < SSD.bytes_per_s / 10
    assert rates.memory(one, 1).bytes_per_s < NEAR.bytes_per_s / 10


def test_a_short_answer_counts_with_what_it_brought() -> None:
    rates = LinkRates(BLOCK)
    rates.observe([run()], [RunTiming(0, 0, 0.0, 0.001, "short")], 0)
    assert rates.messages(0) == []
    rates.observe([run()], [RunTiming(11, 0, 0.1, 1.1, "short")], 0)
    assert rates.memory(run(), 0).bytes_per_s < NEAR.bytes_per_s / 3


def test_a_slow_link_is_tried_again_after_a_while() -> None:
    rates, slow = LinkRates(BLOCK, HALF_LIFE_S), Link(5e6, 0.05)
    for number in range(6):
        rates.observe([run()], [timing(slow, 100)], number / 10)
    (message,) = rates.messages(0.5)
    assert message.memory is not None
    assert message.memory.freshness == pytest.approx(1.0)
    # 100 blocks take 1.6 s to compute.
    assert forecast_s(rates, 1.0) > 4.0
    assert forecast_s(rates, 1.0 + HALF_LIFE_S) < 1.6
    assert forecast_s(rates, 1.0 + 10 * HALF_LIFE_S) == pytest.approx(NEAR.seconds(100 * BLOCK), rel=0.01)
    # One good pull after that is believed.
    rates.observe([run()], [timing(NEAR, 100)], 400.0)
    assert forecast_s(rates, 400.0) < 2 * NEAR.seconds(100 * BLOCK)


def test_a_link_that_fails_again_and_again_is_tried_ever_less() -> None:
    rates, now = LinkRates(BLOCK, HALF_LIFE_S), 0.0
    waits: list[float] = []
    for _ in range(8):
        rates.observe([run()], [RunTiming(3, 0, 0.04, 0.1, "late")], now)
        tried_s = now
        while forecast_s(rates, now) > 0.5:
            now += 0.5
        waits.append(now - tried_s)
    assert waits == sorted(waits)
    assert 4 * waits[0] < waits[-1] < 8 * HALF_LIFE_S
    # The first good pull ends that.
    rates.observe([run()], [timing(NEAR, 100)], now)
    rates.observe([run()], [RunTiming(3, 0, 0.04, 0.1, "late")], now)
    (message,) = rates.messages(now + HALF_LIFE_S)
    assert message.memory is not None
    assert message.memory.freshness == pytest.approx(0.5)


@given(
    st.floats(1e5, 1e11),
    st.floats(1e-4, 10),
    st.floats(1e5, 1e11),
    st.floats(1e-4, 10),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_fading_goes_one_way(
    rate: float, setup_s: float, assumed_rate: float, assumed_setup_s: float, old: float, young: float
) -> None:
    measured, assumed = Link(rate, setup_s), Link(assumed_rate, assumed_setup_s)
    old, young = min(old, young), max(old, young)
    earlier, later = faded(measured, assumed, young), faded(measured, assumed, old)
    assert rate * 0.999 <= earlier.bytes_per_s <= later.bytes_per_s * 1.001
    assert later.bytes_per_s <= max(rate, assumed_rate) * 1.001
    assert setup_s * 1.001 >= earlier.setup_s >= later.setup_s * 0.999


def test_what_is_in_flight_is_a_queue() -> None:
    rates = LinkRates(BLOCK)
    rates.begin([run(num_blocks=10), run("m", 5)])
    assert rates.queue_s(run(), 0) == pytest.approx(10 * BLOCK / NEAR.bytes_per_s)
    assert {one.location_id: one.in_flight_bytes for one in rates.messages(0)} == {"n": 10 * BLOCK, "m": 5 * BLOCK}
    rates.end([run(num_blocks=10), run("m", 5)])
    assert rates.queue_s(run(), 0) == 0.0


def test_only_so_many_holders_are_remembered() -> None:
    rates = LinkRates(BLOCK)
    rates.begin([run("busy")])
    for number in range(3 * MAX_HOLDERS):
        rates.observe([run(f"n{number}")], [timing(NEAR, 10)], number)
    names = [one.location_id for one in rates.messages(100)]
    assert len(names) == MAX_HOLDERS
    assert {"busy", f"n{3 * MAX_HOLDERS - 1}"} <= set(names)


def test_a_holder_that_has_started_anew_is_not_blamed_for_its_past() -> None:
    rates = LinkRates(BLOCK)
    rates.observe([run()], [RunTiming(0, 0, 0.0, 1.0, "failed")], 0.0)
    assert rates.memory(run(), 0.1).seconds(BLOCK) > 5 * NEAR.seconds(BLOCK)
    assert rates.memory(run(epoch=2), 0.1) == NEAR
    assert [one.epoch for one in rates.messages(0.1)] == [1]


@given(st.floats(1e6, 1e11))
def test_what_was_never_measured_is_taken_to_be_worth_trying(compute_bytes_per_s: float) -> None:
    rates = LinkRates(BLOCK)
    rates.compute_bytes_per_s = compute_bytes_per_s
    for link in (rates.memory(run(), 0.0), rates.ssd(run(), 0.0)):
        assert link.bytes_per_s >= 1.99 * compute_bytes_per_s
