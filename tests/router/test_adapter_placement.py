"""Requests with an adapter go to who has it loaded, as far as that is worth the wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.router.domain import Ask, Load, Requirements, WorkerId
from services.router.policies import POLICIES
from tests.router.scenes import IDENTITY, IDLE, NOW_S, Scene

ADAPTER, OTHER = b"a" * 16, b"o" * 16
ABLE = replace(IDENTITY, adapter_slots=4, max_adapter_rank=16, protocol=3)
EMPTY = replace(IDLE, idle_adapter_slots=4, adapter_load_s=0.5)
WITH_IT = replace(EMPTY, adapters=frozenset((ADAPTER,)), idle_adapter_slots=3)


def ask(scene: Scene, rank: int = 8, **fields: object) -> Ask:
    return scene.ask([], tokens=100, requires=Requirements(adapter=ADAPTER, adapter_rank=rank, protocol=3), **fields)


def busy(load: Load, queued_tokens: int) -> Load:
    return replace(load, running_requests=1, queued_prefill_tokens=queued_tokens)


def test_who_has_it_loaded_is_preferred_until_its_queue_is_longer_than_a_load() -> None:
    scene = Scene()
    scene.worker("a", EMPTY, ABLE)
    scene.worker("b", busy(WITH_IT, 200), ABLE)
    assert scene.grant(ask(scene)).worker_id == "b"
    assert scene.grant(scene.ask([], tokens=100)).worker_id == "a"
    scene.worker("b", busy(WITH_IT, 20_000), ABLE)
    answer = scene.grant(ask(scene))
    assert answer.worker_id == "a"
    terms = answer.explanation.terms
    assert sorted(terms["adapter_s"].tolist()) == [0.0, 0.5]
    assert answer.predicted_ttft_s >= 0.5


def test_a_worker_whose_places_are_all_taken_comes_after_one_with_a_free_one() -> None:
    scene = Scene()
    scene.worker("a", replace(EMPTY, adapters=frozenset((OTHER,)), idle_adapter_slots=0), ABLE)
    scene.worker("b", busy(replace(EMPTY, adapter_load_s=0.6), 100), ABLE)
    assert scene.grant(ask(scene)).worker_id == "b"


def test_requests_that_follow_each_other_go_where_the_first_has_it_loaded() -> None:
    """Before any report shows it, and for a while only."""
    scene = Scene()
    for name in ("a", "b", "c"):
        scene.worker(name, EMPTY, ABLE)
    first = scene.grant(ask(scene)).worker_id
    scene.table.workers[WorkerId(first)].adapters.granted(ADAPTER, NOW_S)
    rest = [scene.table.workers[WorkerId(name)].adapters.load_s(ADAPTER, NOW_S + 1) for name in ("a", "b", "c")]
    assert sorted(rest) == [0.0, 0.5, 0.5]
    assert scene.grant(ask(scene), NOW_S + 0.1).worker_id == first
    assert scene.table.workers[WorkerId(first)].adapters.load_s(ADAPTER, NOW_S + 3) == 0.5


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_policy_sends_an_adapter_to_who_cannot_load_it(policy: str) -> None:
    scene = Scene(policy=policy)
    scene.worker("none", EMPTY, IDENTITY)
    scene.worker("old", EMPTY, replace(ABLE, protocol=2))
    scene.worker("low rank", EMPTY, replace(ABLE, max_adapter_rank=4))
    scene.worker("able", busy(EMPTY, 2000), ABLE)
    assert {scene.grant(ask(scene)).worker_id for _ in range(8)} == {"able"}
    assert scene.refusal(ask(scene, rank=32)).detail == "no worker can finish such a request"
