"""Another router's grants and closes in this router's view."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.domain import AttemptId, WorkerId
from services.router.gateway_queues import FORGET_S, GatewayQueues, ModelQueue
from services.router.news.intake import take_in
from services.router.news.messages import Bulletin, ClosedNews, GrantedNews, News, QueuesNews
from services.router.news.outbox import NewsOutbox
from services.router.recent_names import RecentNames
from services.router.worker_state import PendingAttempt
from tests.router.scenes import IDLE, NOW_S, Scene

A = WorkerId("a")
ATTEMPT = AttemptId("r", 1)
GRANTED = GrantedNews(A, 1, ATTEMPT, PendingAttempt(100, 7, -5.0, (("kvstore/k@1", 10.0),)))


@pytest.fixture
def scene() -> Scene:
    scene = Scene()
    scene.worker("a")
    return scene


def tell(scene: Scene, *news: News) -> None:
    for one in news:
        take_in(one, scene.table, GatewayQueues(), NOW_S)


def pending_tokens(scene: Scene) -> float:
    return float(scene.table.rows["pending_tokens"][scene.table.workers[A].row])


def test_a_grant_elsewhere_counts_until_it_is_shown_closed_or_too_old(scene: Scene) -> None:
    tell(scene, GRANTED)
    assert pending_tokens(scene) == 100
    tell(scene, ClosedNews(A, ATTEMPT))
    assert pending_tokens(scene) == 0
    tell(scene, GRANTED)
    scene.table.report(A, replace(IDLE, admitted=("r/1",)), NOW_S)
    assert pending_tokens(scene) == 0
    other = AttemptId("r", 2)
    tell(scene, msgspec.structs.replace(GRANTED, attempt=other))
    scene.table.tick(NOW_S + 4.9)
    assert pending_tokens(scene) == 100
    scene.table.tick(NOW_S + 5.1)
    assert pending_tokens(scene) == 0


def test_news_that_comes_after_the_report_or_of_another_life_counts_nothing(scene: Scene) -> None:
    scene.table.report(A, replace(IDLE, admitted=("r/1",)), NOW_S)
    tell(scene, GRANTED, msgspec.structs.replace(GRANTED, epoch=2, attempt=AttemptId("s", 1)))
    tell(scene, msgspec.structs.replace(GRANTED, worker_id=WorkerId("unknown"), attempt=AttemptId("t", 1)))
    tell(scene, ClosedNews(WorkerId("unknown"), ATTEMPT))
    assert pending_tokens(scene) == 0
    assert not scene.table.workers[A].pending


def test_news_survives_the_wire() -> None:
    bulletin = Bulletin("router-1", [GRANTED, ClosedNews(A, ATTEMPT), QueuesNews("g", (ModelQueue("m", 3, 40),))])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(bulletin), type=Bulletin) == bulletin


def test_an_outbox_that_nobody_empties_drops_the_oldest() -> None:
    outbox = NewsOutbox(most=3)
    news = [ClosedNews(A, AttemptId("r", number)) for number in range(5)]
    for one in news:
        outbox.put(one)
    assert outbox.take() == news[2:]
    assert outbox.dropped == 2
    assert not outbox.take()
    assert not outbox.filled.is_set()


def test_a_gateway_that_falls_silent_waits_for_nothing() -> None:
    queues = GatewayQueues()
    queues.tell("g1", (ModelQueue("m", 3, 300), ModelQueue("n", 1, 10)), NOW_S)
    queues.tell("g2", (ModelQueue("m", 2, 100),), NOW_S + 1)
    assert queues.total("m", NOW_S + 1) == ModelQueue("m", 5, 400)
    queues.tell("g2", (), NOW_S + 2)
    assert queues.total("m", NOW_S + 2) == ModelQueue("m", 3, 300)
    assert queues.total("m", NOW_S + FORGET_S + 0.1) == ModelQueue("m", 0, 0)
    assert not len(queues)


@given(st.lists(st.sampled_from("abcdefgh"), max_size=60), st.integers(1, 5))
def test_recent_names_are_the_last_distinct_ones(names: list[str], most: int) -> None:
    recent = RecentNames(most)
    for name in names:
        recent.add([name])
        assert name in recent
        assert len(recent) <= most
