"""The books of a decision: what counts before its answer goes out, and what is written afterwards."""

from __future__ import annotations

from services.common.redis_client import RedisHealth
from services.router.admission import AdmissionConfig
from services.router.decisions import Decisions, OpenAttempts
from services.router.domain import Placement
from services.router.metrics import RouterMetrics
from services.router.placement import PlacementConfig
from tests.router.scenes import IDLE, NOW_S, Scene, chain


def test_a_grant_is_load_at_once_and_explained_when_it_is_noted() -> None:
    scene = Scene()
    scene.worker("w")
    health = RedisHealth()
    health.answered()
    config = PlacementConfig("predicted_ttft", AdmissionConfig(30.0))
    decisions = Decisions(config, health, RouterMetrics(), pending_timeout_s=5.0, explained_requests=10)
    for worker_id, worker in scene.table.workers.items():
        assert worker.identity is not None
        decisions.table.add(worker.record)
        decisions.table.identify(worker_id, worker.identity, NOW_S)
        decisions.table.report(worker_id, IDLE, NOW_S)
    opened = OpenAttempts()
    ask = scene.ask(chain(4))
    decided = decisions.decide(ask, opened, NOW_S)
    assert isinstance(decided.answer, Placement)
    assert list(opened) == [ask.id]
    assert [len(worker.pending) for worker in decisions.table.workers.values()] == [1]
    assert decisions.explanations.of(ask.id.request_id) == []
    decisions.note(decided)
    (explained,) = decisions.explanations.of(ask.id.request_id)
    assert (explained.id, explained.worker_id) == (ask.id, "w")
