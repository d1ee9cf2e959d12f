"""The books of a decision: what counts before its answer goes out, and what is written afterwards."""

from __future__ import annotations

from services.common.fair_queue import RequestClass
from services.common.redis_client import RedisHealth
from services.router.admission import AdmissionConfig
from services.router.decisions import Decisions, OpenAttempts
from services.router.domain import Placement
from services.router.metrics import RouterMetrics
from services.router.placement import PlacementConfig
from tests.router.scenes import IDLE, NOW_S, Scene, chain


def books(scene: Scene) -> Decisions:
    """Of a router that knows the scene's workers, all of them idle."""
    health = RedisHealth()
    health.answered()
    config = PlacementConfig("predicted_ttft", AdmissionConfig(30.0))
    decisions = Decisions(config, health, RouterMetrics(), pending_timeout_s=5.0, explained_requests=10)
    for worker_id, worker in scene.table.workers.items():
        assert worker.identity is not None
        decisions.table.add(worker.record)
        decisions.table.identify(worker_id, worker.identity, NOW_S)
        decisions.table.report(worker_id, IDLE, NOW_S)
    return decisions


def test_how_long_batch_work_is_put_off_is_expected_of_nobody_else() -> None:
    scene = Scene()
    scene.worker("w")
    decisions, opened = books(scene), OpenAttempts()

    def expected_s(kind: RequestClass) -> float:
        """What one more request is predicted to take, before it takes ten times as long."""
        ask = scene.ask(chain(4), tokens=4000, priority=kind.value)
        answer = decisions.ask(ask, opened, NOW_S)
        assert isinstance(answer, Placement)
        took_s = 10.0 * answer.predicted_ttft_s
        decisions.done(ask.id, opened, NOW_S, outcome="ok", ttft_s=took_s)
        return answer.predicted_ttft_s

    first_s, *later_s = [expected_s(RequestClass.BATCH) for _ in range(20)]
    assert later_s == [first_s] * 19
    assert [expected_s(RequestClass.INTERACTIVE) for _ in range(20)][-1] > 1.5 * first_s


def test_a_grant_is_load_at_once_and_explained_when_it_is_noted() -> None:
    scene = Scene()
    scene.worker("w")
    decisions, opened = books(scene), OpenAttempts()
    ask = scene.ask(chain(4))
    decided = decisions.decide(ask, opened, NOW_S)
    assert isinstance(decided.answer, Placement)
    assert list(opened) == [ask.id]
    assert [len(worker.pending) for worker in decisions.table.workers.values()] == [1]
    assert decisions.explanations.of(ask.id.request_id) == []
    decisions.note(decided)
    (explained,) = decisions.explanations.of(ask.id.request_id)
    assert (explained.id, explained.worker_id) == (ask.id, "w")
