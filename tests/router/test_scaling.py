"""Replicas that a load asks for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.decaying_sum import DecayingSum
from services.router.domain import Placement, RefusalReason, Refused, WorkerId
from services.router.gateway_queues import GatewayQueues, ModelQueue
from services.router.lateness import Lateness
from services.router.pools import Pools
from services.router.scaling import DesiredReplicas, ScalingConfig, backlog, needed_replicas, work_s
from tests.router.scenes import IDENTITY, IDLE, NOW_S, Scene, chain

CONFIG = ScalingConfig()
RATE = IDENTITY.prefill_tokens_per_s


def run(desired: DesiredReplicas, needs: list[int], *, replicas: int = 1, start_s: float = 0.0) -> list[int]:
    return [desired.update(need, replicas, start_s + second) for second, need in enumerate(needs)]


def test_more_replicas_are_wanted_once_the_need_lasts_and_fewer_much_later() -> None:
    desired = DesiredReplicas(CONFIG)
    up = run(desired, [1] * 3 + [4] * 10)
    assert up[3 + int(CONFIG.confirm_s) - 1] == 1
    assert up[-1] == 4
    down = run(desired, [1] * 200, start_s=13)
    assert down[: int(CONFIG.keep_s) - 5] == [4] * (int(CONFIG.keep_s) - 5)
    assert down[-1] == 1


def test_a_burst_buys_no_replica_and_a_new_router_sheds_none() -> None:
    assert set(run(DesiredReplicas(CONFIG), [1, 9, 9, 1, 1, 9, 1, 1])) == {1}
    assert set(run(DesiredReplicas(CONFIG), [1] * int(CONFIG.keep_s), replicas=5)) == {5}


@given(st.floats(0, 50), st.floats(0, 1000), st.floats(0, 50), st.floats(0, 1000))
def test_more_work_never_asks_for_fewer(arriving: float, waiting_s: float, more: float, longer_s: float) -> None:
    before = needed_replicas(arriving, waiting_s, CONFIG)
    assert 1 <= before <= needed_replicas(arriving + more, waiting_s + longer_s, CONFIG)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=300), st.integers(0, 20))
def test_what_is_wanted_has_been_needed_or_was_there(needs: list[int], replicas: int) -> None:
    for count in run(DesiredReplicas(CONFIG), needs, replicas=replicas):
        assert 1 <= count <= max(*needs, replicas, 1)


def test_a_steady_rate_is_measured_as_such() -> None:
    total = DecayingSum(30.0, 5.0)
    for second in range(200):
        total.add(2.5, float(second))
        if second >= 10:
            assert total.rate(second + 0.5) == pytest.approx(2.5, rel=0.15)
    assert total.rate(1000.0) < 0.01


def test_the_lateness_covers_most_answers_stays_bounded_and_is_forgotten() -> None:
    lateness = Lateness()
    for _ in range(300):
        lateness.update(0.01, 1.0)
    assert lateness.factor == 1.0
    for number in range(1000):
        lateness.update(1.0, 1.4 if number % 2 else 0.9)
    assert lateness.factor == pytest.approx(1.4, abs=0.1)
    for _ in range(100):
        lateness.update(1.0, 50.0)
    assert lateness.factor == 2.0
    for _ in range(300):
        lateness.update(1.0, 0.9)
    assert lateness.factor == 1.0


def pools_of(scene: Scene, queues: GatewayQueues) -> Pools:
    return Pools(CONFIG, scene.table, queues, scene.placer)


def test_what_waits_in_gateways_and_at_workers_asks_for_replicas() -> None:
    scene, queues = Scene(), GatewayQueues()
    scene.worker("a", replace(IDLE, running_requests=1, queued_prefill_tokens=int(4 * RATE)))
    scene.worker("b")
    pools = pools_of(scene, queues)
    pools.update(NOW_S)
    (signal,) = pools.signals
    assert (signal.key.model, signal.key.role, signal.replicas, signal.desired) == ("m", "both", 2, 2)
    assert signal.backlog.seconds == pytest.approx(4.0)
    for second in range(10):
        queues.tell("g", (ModelQueue("m", 100, int(80 * RATE)),), NOW_S + second)
        for name in ("a", "b"):
            scene.table.report(WorkerId(name), IDLE, NOW_S + second)
        pools.update(NOW_S + second)
    (signal,) = pools.signals
    assert signal.backlog.queue_tokens == 80 * RATE
    assert signal.backlog.waiting_requests == 100
    assert signal.desired >= 8


def test_attainment_counts_late_grants_and_refusals_as_misses() -> None:
    scene = Scene()
    scene.worker("a")
    pools = pools_of(scene, GatewayQueues())
    pools.update(NOW_S)
    ask = scene.ask(chain(2), ttft_objective_s=1.0)
    placement = scene.grant(ask)
    late = replace(placement, predicted_ttft_s=1.5)
    refused = Refused(RefusalReason.DEADLINE, "", 1.0)
    waits = Refused(RefusalReason.OVERLOADED, "", 1.0)
    answers: list[Placement | Refused] = [placement, late, refused, waits, placement]
    for answer in answers:
        pools.answered(ask, answer, NOW_S)
    pools.update(NOW_S)
    assert pools.signals[0].attainment == pytest.approx(0.5)
    scene.table.forget(WorkerId("a"))
    pools.update(NOW_S)
    assert not pools.signals


def test_work_is_that_of_a_full_batch_and_no_worker_no_backlog_of_time() -> None:
    scene = Scene()
    scene.worker("a")
    rows = scene.table.rows.take(np.flatnonzero(scene.table.rows["live"]))
    assert work_s(rows, RATE, 0.0)[0] == pytest.approx(1.0)
    assert work_s(rows, 0.0, 160.0)[0] < 160 * IDENTITY.decode_step_s / 8
    empty = backlog(scene.table.rows.take([]), waiting_requests=3, waiting_tokens=300.0, output_tokens=10.0)
    assert (empty.queue_tokens, empty.seconds) == (300.0, 0.0)


def test_a_pool_without_workers_is_wanted_while_something_waits_and_goes_when_nobody_uses_it() -> None:
    scene, queues = Scene(), GatewayQueues()
    pools = Pools(ScalingConfig(idle_s=60.0), scene.table, queues, scene.placer)
    pools.update(NOW_S)
    assert pools.signals == ()
    queues.tell("g", (ModelQueue("m", 3, 0),), NOW_S)
    pools.update(NOW_S)
    (signal,) = pools.signals
    assert (signal.key.model, signal.key.role, signal.replicas, signal.desired) == ("m", "both", 0, 1)
    assert signal.backlog.waiting_requests == 3
    # It has its worker, which works and then stands idle.
    queues.tell("g", (), NOW_S)
    scene.worker("a", replace(IDLE, running_requests=1))
    pools.update(NOW_S)
    assert [(one.running, one.idle_s, one.desired) for one in pools.signals] == [(1, 0.0, 1)]
    scene.table.report(WorkerId("a"), IDLE, NOW_S + 1)
    for second, desired in ((59, 1), (60, 0)):
        pools.update(NOW_S + second)
        assert [(one.running, one.idle_s, one.desired) for one in pools.signals] == [(0, float(second), desired)]
    # Any use has it stay, and without the setting nothing has it go.
    pools.granted(WorkerId("a"), 16, NOW_S + 61)
    pools.update(NOW_S + 62)
    assert pools.signals[0].desired == 1
    always = pools_of(scene, queues)
    for second in (0, 100_000):
        always.update(NOW_S + second)
    assert always.signals[0].desired == 1
