"""When a prompt is computed by one worker and answered by another, and what is granted then."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.redis_client import RedisHealth
from services.common.step_costs import StepCosts
from services.router.admission import AdmissionConfig
from services.router.decisions import Decisions, OpenAttempts
from services.router.domain import Ask, AttemptId, Load, Placement, RefusalReason, WorkerId
from services.router.metrics import RouterMetrics
from services.router.placement import PlacementConfig
from tests.router.scenes import IDENTITY, IDLE, NOW_S, Scene, chain, links

COSTS = StepCosts(0.01, 0.005, 0.0005, 0.0, 0.001, 0.0)
PREFILL = replace(IDENTITY, role="prefill")
DECODE = replace(IDENTITY, role="decode")


def decoding(count: int, *, queued_tokens: int = 0) -> Load:
    """A worker with so many running streams."""
    return replace(
        IDLE,
        running_requests=count,
        decoding_sequences=count,
        context_tokens=500 * count,
        queued_prefill_tokens=queued_tokens,
        step_costs=COSTS,
    )


def pools(streams: int, *, max_queue_s: float = 30.0, prefill: Load | None = None) -> Scene:
    """A worker for prompts and one for outputs, which has `streams` of them."""
    scene = Scene(max_queue_s=max_queue_s)
    scene.worker("p", prefill or replace(IDLE, step_costs=COSTS), PREFILL)
    scene.worker("d", decoding(streams), DECODE)
    return scene


def long_ask(scene: Scene, *, blocks: int = 125, **fields: object) -> Ask:
    return scene.ask(chain(blocks), **{"can_hand_off": True, **fields})


def test_a_long_prompt_spares_the_running_streams() -> None:
    placement = pools(8).grant(long_ask(pools(8)))
    assert placement.worker_id == "p"
    second = placement.handoff
    assert second is not None
    assert second.worker_id == "d"
    (run,) = second.pull_plan
    assert (run.kind, run.location_id, run.first_block, run.num_blocks) == ("worker", "p", 0, 125)
    assert run.wait_s > placement.predicted_ttft_s
    assert second.predicted_ttft_s > placement.predicted_ttft_s
    assert (second.prefill_tokens, second.num_blocks) == (5, 126)


@pytest.mark.parametrize(
    ("streams", "blocks", "rate", "handed_over"),
    [
        (8, 125, 1e9, True),
        # Nobody is disturbed.
        (0, 125, 1e9, False),
        # There is next to nothing to compute.
        (1, 1, 1e9, False),
        # The link is slower than computing.
        (1, 125, 2e6, False),
    ],
)
def test_a_short_prompt_a_slow_link_or_a_low_load_stay_with_one_worker(
    streams: int, blocks: int, rate: float, handed_over: bool
) -> None:
    scene = pools(streams)
    load = replace(decoding(streams), holders=links("worker/p", bytes_per_s=rate).holders)
    scene.worker("d", load, DECODE)
    placement = scene.grant(long_ask(scene, blocks=blocks))
    assert (placement.handoff is not None) == handed_over
    assert placement.worker_id == ("p" if handed_over else "d")


def test_a_worker_for_prompts_gets_nothing_else_while_another_is_there() -> None:
    scene = Scene()
    scene.worker("p", IDLE, PREFILL)
    scene.worker("d", decoding(8), DECODE)
    assert scene.grant(long_ask(scene, can_hand_off=False)).worker_id == "d"
    assert scene.grant(long_ask(scene, resumes=True)).worker_id == "d"
    assert scene.grant(long_ask(scene, policy="least_loaded")).worker_id == "d"
    assert scene.grant(long_ask(scene, excluded_workers=frozenset({"p"}))).worker_id == "d"


@pytest.mark.parametrize("why", ["it is silent", "it has failed", "there is none"])
def test_a_worker_for_prompts_stands_in_for_those_that_answer(why: str) -> None:
    scene = Scene()
    for name in ("p", "q"):
        scene.worker(name, IDLE, PREFILL)
    fields: dict[str, object] = {}
    if why != "there is none":
        scene.worker("d", IDLE, DECODE)
    if why == "it is silent":
        scene.table.broken(WorkerId("d"))
    elif why == "it has failed":
        fields = {"excluded_workers": frozenset({"d"})}
    for resumes in (False, True):
        granted = scene.grant(long_ask(scene, resumes=resumes, **fields))
        assert granted.worker_id in ("p", "q")
        assert granted.handoff is None
    assert scene.refusal(long_ask(scene, excluded_workers=frozenset("pqd"))).reason is RefusalReason.NO_WORKER


def test_nobody_takes_over_from_a_worker_that_gives_nothing() -> None:
    scene = Scene()
    scene.worker("p", replace(IDLE, step_costs=COSTS), PREFILL, pull_address="")
    scene.worker("d", decoding(8), DECODE)
    assert scene.grant(long_ask(scene)).worker_id == "d"


def test_what_the_second_worker_holds_is_not_pulled() -> None:
    scene = pools(8)
    ids = chain(125)
    scene.hold("worker/d", ids[:50])
    second = scene.grant(scene.ask(ids, can_hand_off=True)).handoff
    assert second is not None
    assert (second.local_blocks, second.pull_plan[0].first_block, second.pull_plan[0].num_blocks) == (50, 50, 75)
    scene.hold("worker/d", ids[50:])
    assert scene.grant(scene.ask(ids, can_hand_off=True)).handoff is None


def test_a_pair_takes_what_no_single_worker_could() -> None:
    scene = pools(1, max_queue_s=0.2)
    scene.worker("d", decoding(1, queued_tokens=4000), DECODE)
    assert scene.refusal(long_ask(scene, can_hand_off=False)).reason is RefusalReason.OVERLOADED
    assert scene.grant(long_ask(scene)).handoff is not None


@pytest.mark.parametrize(("streams", "queued", "taker"), [(8, 4000, "p"), (1, 4000, "d"), (8, 40_000, "d")])
def test_a_prompt_waits_for_a_full_worker_as_long_as_that_costs_less_than_others_would_wait(
    streams: int, queued: int, taker: str
) -> None:
    """Behind 2 s of prompts rather than to stop eight streams for 1 s."""
    scene = pools(streams, max_queue_s=0.2, prefill=decoding(1, queued_tokens=queued))
    assert scene.grant(long_ask(scene)).worker_id == taker


def test_nobody_waits_for_a_full_worker_beyond_the_limit_where_nothing_bounds_that() -> None:
    scene = pools(8, max_queue_s=0.2, prefill=decoding(1, queued_tokens=4000))
    scene.worker("d", decoding(8, queued_tokens=4000), DECODE)
    assert scene.refusal(long_ask(scene)).reason is RefusalReason.OVERLOADED


def test_a_prompt_does_not_wait_beyond_its_objective() -> None:
    scene = pools(8, max_queue_s=0.2, prefill=decoding(1, queued_tokens=4000))
    assert scene.grant(long_ask(scene, ttft_objective_s=2.5)).worker_id == "d"


def test_the_worker_that_answers_is_to_keep_its_promises() -> None:
    scene = pools(8)
    assert scene.grant(long_ask(scene, tpot_objective_s=1.0)).handoff is not None
    assert scene.refusal(long_ask(scene, tpot_objective_s=0.005)).reason is RefusalReason.OVERLOADED


def test_both_parts_are_counted_until_they_are_closed() -> None:
    config = PlacementConfig("predicted_ttft", AdmissionConfig(30.0))
    health = RedisHealth()
    health.answered()
    decisions = Decisions(config, health, RouterMetrics(), pending_timeout_s=5.0, explained_requests=10)
    scene = pools(8)
    for worker in scene.table.workers.values():
        assert worker.identity is not None
        decisions.table.add(worker.record)
        decisions.table.identify(worker.identity.worker_id, worker.identity, NOW_S)
        load = decoding(8) if worker.identity.role == "decode" else replace(IDLE, step_costs=COSTS)
        decisions.table.report(worker.identity.worker_id, load, NOW_S)
    ask, opened = long_ask(scene), OpenAttempts()
    assert isinstance(decisions.ask(ask, opened, NOW_S), Placement)
    pending = {name: set(worker.pending) for name, worker in decisions.table.workers.items()}
    assert pending == {"p": {f"{ask.id.request_id}/1"}, "d": {f"{ask.id.request_id}/2"}}
    assert set(opened) == {ask.id, AttemptId(ask.id.request_id, 2)}
    demands = {key.role: pool.demand.work.at(NOW_S) for key, pool in decisions.pools._pools.items()}
    assert 0 < demands["decode"] != demands["prefill"]
    assert demands["prefill"] == pytest.approx(2005 / IDENTITY.prefill_tokens_per_s)
    (explained,) = decisions.explanations.of(ask.id.request_id)
    assert (explained.worker_id, explained.handoff_worker_id) == ("p", "d")
    decisions.done(ask.id, opened, NOW_S, outcome="cancelled", ttft_s=1.0, output_tokens=3)
    decisions.done(ask.id.handoff, opened, NOW_S, outcome="ok", tpot_s=0.02, output_tokens=60)
    assert not opened
    assert not any(worker.pending for worker in decisions.table.workers.values())


@given(st.integers(0, 32), st.integers(1, 300), st.integers(0, 3000), st.integers(0, 16))
def test_a_pair_is_two_workers_one_of_each_kind(streams: int, blocks: int, queued: int, busy: int) -> None:
    scene = pools(streams, prefill=decoding(busy, queued_tokens=queued))
    scene.worker("b", decoding(busy), IDENTITY)
    placement = scene.grant(long_ask(scene, blocks=blocks))
    if placement.handoff is None:
        assert placement.worker_id in ("d", "b")
    else:
        assert placement.worker_id == "p"
        assert placement.handoff.worker_id in ("d", "b")
        assert placement.handoff.handoff is None
