"""The load view: reports, grants that no report shows yet, life signs."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from services.router.domain import AttemptId, WorkerId
from services.router.rates import StepSlope
from services.router.worker_state import PendingAttempt
from tests.router.scenes import IDLE, NOW_S, Scene

A = WorkerId("a")


@pytest.fixture
def scene() -> Scene:
    scene = Scene()
    scene.worker("a")
    return scene


def pending(scene: Scene) -> tuple[float, float]:
    rows, row = scene.table.rows, scene.table.workers[A].row
    return float(rows["pending"][row]), float(rows["pending_tokens"][row])


def is_suspect(scene: Scene, now_s: float) -> bool:
    return bool(scene.table.suspect(now_s)[scene.table.workers[A].row])


def test_a_grant_counts_until_a_report_shows_it(scene: Scene) -> None:
    attempt = AttemptId("r/1", 2)
    scene.table.grant(A, attempt, PendingAttempt(100, 7, NOW_S))
    assert pending(scene) == (1, 100)
    scene.table.report(A, replace(IDLE, admitted=("r/1/1",)), NOW_S)
    assert pending(scene) == (1, 100)
    scene.table.report(A, replace(IDLE, admitted=("r/1/2",)), NOW_S)
    assert pending(scene) == (0, 0)


@pytest.mark.parametrize("way", ["done", "ended", "timeout"])
def test_a_grant_that_never_was_admitted_is_released(scene: Scene, way: str) -> None:
    attempt = AttemptId("r", 1)
    scene.table.grant(A, attempt, PendingAttempt(100, 7, NOW_S))
    if way == "done":
        scene.table.end(A, attempt, NOW_S)
    elif way == "ended":
        scene.table.report(A, replace(IDLE, ended=("r/1",)), NOW_S)
    else:
        scene.table.tick(NOW_S + 4.9)
        assert pending(scene) == (1, 100)
        scene.table.tick(NOW_S + 5.1)
        assert scene.table.pending_timeouts == 1
    assert pending(scene) == (0, 0)
    assert not scene.table.workers[A].pending


def test_silence_a_broken_stream_and_standing_steps_make_suspect(scene: Scene) -> None:
    assert not is_suspect(scene, NOW_S + 0.9)
    assert is_suspect(scene, NOW_S + 1.1)
    scene.table.report(A, IDLE, NOW_S + 2)
    assert not is_suspect(scene, NOW_S + 2)
    scene.table.broken(A)
    assert is_suspect(scene, NOW_S + 2)
    working = replace(IDLE, running_requests=1, progress=5)
    for tenth in range(20):
        scene.table.report(A, working, NOW_S + 3 + tenth / 10)
    assert is_suspect(scene, NOW_S + 4.9)
    scene.table.report(A, replace(working, progress=6), NOW_S + 5)
    assert not is_suspect(scene, NOW_S + 5)


def test_silence_counts_from_the_last_word_of_the_quietest_process(scene: Scene) -> None:
    scene.table.report(A, IDLE, NOW_S, silent_s=0.3)
    assert scene.table.present(NOW_S + 0.6).serving[scene.table.workers[A].row]
    assert not is_suspect(scene, NOW_S + 0.6)
    assert is_suspect(scene, NOW_S + 0.8)
    assert not scene.table.present(NOW_S + 0.8).serving[scene.table.workers[A].row]
    scene.table.report(A, IDLE, NOW_S + 0.9)
    assert scene.table.present(NOW_S + 1.0).serving[scene.table.workers[A].row]
    # What was kept of who is there must not outlive an older word.
    scene.table.report(A, IDLE, NOW_S + 1.1, silent_s=0.6)
    assert not scene.table.present(NOW_S + 1.7).serving[scene.table.workers[A].row]


def test_an_idle_worker_whose_steps_stand_still_is_well(scene: Scene) -> None:
    for tenth in range(30):
        scene.table.report(A, IDLE, NOW_S + tenth / 10)
    assert not is_suspect(scene, NOW_S + 3)


def test_another_epoch_starts_anew_and_forgetting_leaves_nothing(scene: Scene) -> None:
    scene.table.grant(A, AttemptId("r", 1), PendingAttempt(1, 1, NOW_S))
    worker = scene.table.workers[A]
    scene.table.add(msgspec.structs.replace(worker.record, epoch=2))
    assert not scene.table.workers[A].pending
    assert is_suspect(scene, NOW_S)
    scene.table.forget(A)
    assert not scene.table.rows["live"].any()
    assert not scene.table.by_row
    assert worker.row in scene.table._free


def test_the_table_grows(scene: Scene) -> None:
    for number in range(100):
        scene.worker(f"w{number}")
    assert scene.table.rows["live"].sum() == 101
    assert scene.table.serving(NOW_S).sum() == 101


def test_the_slope_of_a_step_is_learned() -> None:
    slope = StepSlope()
    assert slope.update(0.02, 0.02, 1) == pytest.approx(0.0006)
    assert slope.update(0.02, 0.05, 4) == pytest.approx(0.01)
    assert slope.update(0.02, 0.02, 4) == pytest.approx(0.009)


def test_a_pause_of_the_router_is_not_taken_for_silence_of_the_workers(scene: Scene) -> None:
    scene.table.tick(NOW_S)
    assert not is_suspect(scene, NOW_S + 3)
    scene.table.tick(NOW_S + 3)
    assert not is_suspect(scene, NOW_S + 3.4)
    for tenth in range(1, 12):
        scene.table.tick(NOW_S + 3 + tenth / 10)
    assert is_suspect(scene, NOW_S + 4.1)


def test_a_worker_that_never_pulled_can_go(scene: Scene) -> None:
    scene.table.forget(A)
    assert not scene.table.workers
    assert not scene.table.rows["live"].any()
