"""The simulated worker against itself, step by step, and against what the time model says."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.simulator.job import Job
from services.router.simulator.worker import SimWorker
from tests.router.simulator.scenes import BLOCK, SMALL, job

# (gap before it, document, prompt tokens, output tokens)
Arrival = tuple[float, int, int, int]
ARRIVALS = st.lists(
    st.tuples(st.floats(0.0, 0.3), st.integers(0, 4), st.integers(1, 1500), st.integers(1, 80)), min_size=1, max_size=25
)


class StepwiseWorker(SimWorker):
    """Every segment is one step."""

    def _begin(self, now_s: float, step_s: float, steps: int) -> None:
        super()._begin(now_s, step_s, min(1, steps))


@dataclass
class Ended:
    """When things happened, by the job's key."""

    first_s: dict[int, float] = field(default_factory=dict)
    finished_s: dict[int, float] = field(default_factory=dict)


def run(worker: SimWorker, arrivals: list[Arrival]) -> Ended:
    ended = Ended()
    at_s = 0.0
    pending: list[tuple[float, Job]] = []
    for number, (gap_s, document, prompt, output) in enumerate(arrivals):
        at_s += gap_s
        pending.append((at_s, job(document, prompt, output, key=number)))
    while pending or worker.end_s < math.inf:
        if pending and pending[0][0] < worker.end_s:
            now_s, one = pending.pop(0)
            worker.submit(one, now_s)
            continue
        now_s = worker.end_s
        advanced = worker.advance()
        for one in advanced.first_tokens:
            ended.first_s[int(str(one.key))] = now_s
        for one in advanced.finished:
            assert int(str(one.key)) not in ended.finished_s
            assert one.generated == one.output_tokens
            ended.finished_s[int(str(one.key))] = now_s
        check(worker)
    return ended


def check(worker: SimWorker) -> None:
    cache = worker.cache
    assert cache.available >= 0
    assert cache.private + (cache.capacity - cache.private - cache.available) + cache.idle <= cache.capacity
    assert cache.private >= 0


@given(ARRIVALS)
@settings(max_examples=30)
def test_every_request_ends_once_and_leaves_nothing_but_cache(arrivals: list[Arrival]) -> None:
    worker = SimWorker(SMALL)
    ended = run(worker, arrivals)
    assert sorted(ended.finished_s) == list(range(len(arrivals))) == sorted(ended.first_s)
    assert worker.is_idle
    assert worker.cache.available == worker.cache.capacity
    state = worker.state(1e9)
    assert (state.running, state.waiting, state.queued_prefill_tokens, state.decoding) == (0, 0, 0, 0)


@given(ARRIVALS)
@settings(max_examples=30)
def test_the_closed_form_is_the_sum_of_its_steps(arrivals: list[Arrival]) -> None:
    whole, stepwise = SimWorker(SMALL), StepwiseWorker(SMALL)
    first, second = run(whole, arrivals), run(stepwise, arrivals)
    assert first.first_s == pytest.approx(second.first_s, abs=1e-6)
    assert first.finished_s == pytest.approx(second.finished_s, abs=1e-6)
    assert whole.busy_s == pytest.approx(stepwise.busy_s)
    assert (whole.prefilled_tokens, whole.preemptions) == (stepwise.prefilled_tokens, stepwise.preemptions)
    assert whole.rates.prefill_tokens_per_s == pytest.approx(stepwise.rates.prefill_tokens_per_s)
    assert whole.rates.decode_step_s == pytest.approx(stepwise.rates.decode_step_s)


@given(ARRIVALS)
@settings(max_examples=20)
def test_what_the_cache_holds_is_prefix_closed_and_announced_in_full(arrivals: list[Arrival]) -> None:
    worker = SimWorker(SMALL)
    run(worker, arrivals)
    adds, removes = worker.cache.take_changes()
    assert set(adds) - set(removes) == worker.cache.ids()
    for block_id in worker.cache.ids():
        number = int.from_bytes(block_id[8:], "little")
        before = block_id[:8] + max(0, number - 1).to_bytes(8, "little")
        assert before in worker.cache


def test_one_request_takes_what_the_time_model_says() -> None:
    worker = SimWorker(SMALL)
    ended = run(worker, [(0.0, 1, 1000, 11)])
    assert ended.first_s[0] == pytest.approx(1000 / 20_000)
    assert ended.finished_s[0] == pytest.approx(1000 / 20_000 + 10 * 0.008_05)


def test_the_second_of_a_document_computes_only_its_rest() -> None:
    worker = SimWorker(SMALL)
    ended = run(worker, [(0.0, 1, 1000, 1), (1.0, 1, 1000, 1)])
    rest = 1000 - 62 * BLOCK
    assert ended.first_s[1] == pytest.approx(1.0 + rest / 20_000)
    assert worker.prefilled_tokens == 1000 + rest


def test_the_same_prompt_is_never_a_full_hit() -> None:
    worker = SimWorker(SMALL)
    run(worker, [(0.0, 1, 10 * BLOCK, 1), (1.0, 1, 10 * BLOCK, 1)])
    assert worker.prefilled_tokens == 11 * BLOCK


def test_a_prompt_that_comes_while_others_decode_waits_for_one_step() -> None:
    worker = SimWorker(SMALL)
    worker.submit(job(1, 20, 100), 0.0)
    worker.advance()
    began_s = worker.end_s - 99 * 0.008_05
    worker.submit(job(2, 16, 2), began_s + 0.5 * 0.008_05)
    assert worker.end_s == pytest.approx(began_s + 0.008_05)


def test_answers_that_outgrow_the_pool_preempt_the_latest_and_end_all_the_same() -> None:
    worker = SimWorker(SMALL)
    ended = run(worker, [(0.001, number, 480, 700) for number in range(8)])
    assert worker.preemptions > 0
    assert len(ended.finished_s) == 8
    assert ended.finished_s[0] < ended.finished_s[7]


def test_a_lost_worker_gives_back_its_requests_with_what_they_have_drawn() -> None:
    worker = SimWorker(SMALL)
    worker.submit(job(1, 160, 100), 0.0)
    worker.submit(job(2, 4000, 10), 0.0)
    worker.advance()
    lost = worker.lose(worker.end_s)
    assert [one.key for one in lost] == [1, 2]
    assert 1 <= lost[0].generated < 100
    assert lost[1].generated == 0
    assert worker.is_idle
    assert worker.end_s == math.inf


def test_work_that_cannot_run_soon_is_stale_and_an_idle_worker_takes_anything() -> None:
    worker = SimWorker(SMALL)
    big = job(1, 4000, 20)
    assert not worker.is_stale(big, 0)
    worker.submit(big, 0.0)
    assert not worker.is_stale(job(2, 16, 1), 0)
    assert worker.is_stale(job(3, 4000 + BLOCK, 1), 0)
    assert not worker.is_stale(job(1, 2000, 1), 0)
    # What the decision counted on is not here any more.
    assert worker.is_stale(job(4, 4050, 1), 253)


@given(ARRIVALS, st.integers(1, 900), st.floats(0.0, 1.0))
@settings(max_examples=30)
def test_a_forecast_is_what_happens_when_nothing_else_comes(
    arrivals: list[Arrival], prompt: int, ask_at: float
) -> None:
    worker = SimWorker(replace(SMALL, cached_tokens=1 << 20))
    at_s = 0.0
    for number, (gap_s, document, tokens, output) in enumerate(arrivals):
        at_s += gap_s
        while worker.end_s <= at_s:
            worker.advance()
        worker.submit(job(document, tokens, output, key=number), at_s)
    asked_s = at_s + ask_at
    while worker.end_s <= asked_s:
        worker.advance()
    # A document of its own: what others compute meanwhile would shorten its prefill.
    wanted = job(99, prompt, 5)
    expected_s = worker.first_token_s([wanted], asked_s)
    worker.submit(wanted, asked_s)
    while wanted.first_token_s < 0:
        worker.advance()
    assert expected_s == pytest.approx(wanted.first_token_s, abs=1e-6)
