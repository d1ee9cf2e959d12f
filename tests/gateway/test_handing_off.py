"""A prompt that one worker computes and another answers: the client sees what one worker would have said."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from kvmesh.v1.router_pb2 import OUTCOME_CANCELLED, OUTCOME_OK, OUTCOME_STALE, OUTCOME_WORKER_FAILED

from tests.gateway.conftest import ANSWER, Mesh
from tests.gateway.fakes import Script
from tests.gateway.test_rescue import plain, reply, variants
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLOW_S = 0.03


@pytest.fixture
def pools(mesh: Mesh) -> Iterator[Mesh]:
    """w0 computes prompts, w1 takes over; each keeps to a script of its own (`scripts`)."""
    before = [worker.script for worker in mesh.workers]
    mesh.router.taker = "w1"
    yield mesh
    mesh.router.taker = ""
    for worker, script in zip(mesh.workers, before, strict=True):
        worker.script = script


def scripts(mesh: Mesh, first: Script, second: Script, *later: Script) -> None:
    """Of the two parts, and of what w1 is given after them."""
    mesh.workers[0].script = lambda _: first
    plan = [second, *later]
    mesh.workers[1].script = lambda _: plan.pop(0) if len(plan) > 1 else plan[0]


async def outcomes(mesh: Mesh, count: int = 2) -> dict[int, int]:
    """How the attempts were closed, once each."""
    await eventually(lambda: len(mesh.router.dones) >= count)
    assert len(mesh.router.dones) == count
    return {done.attempt: done.outcome for done in mesh.router.dones}


@pytest.mark.parametrize(("prefill_s", "prepare_s"), [(0.0, 0.0), (0.0, 0.1), (0.1, 0.0)])
@pytest.mark.parametrize(
    ("path", "script", "fields"),
    [
        ("chat", plain, {"logprobs": True, "top_logprobs": 1}),
        ("complete", variants, {"n": 2, "stop": ["France is", "more of"]}),
        ("complete", plain, {"max_tokens": 1}),
        ("complete", plain, {"prompt": ["a", "b", "c"]}),
    ],
)
async def test_the_answer_is_the_undisturbed_one(
    pools: Mesh, path: str, script: Any, fields: dict[str, Any], prefill_s: float, prepare_s: float
) -> None:
    pools.router.taker = ""
    scripts(pools, script(pools, cached=5), script(pools))
    expected = await reply(pools, path, fields)
    pools.router.taker = "w1"
    scripts(
        pools,
        script(pools, cached=5, pause_s=SLOW_S, prefill_s=prefill_s),
        script(pools, cached=5, prepare_s=prepare_s),
    )
    assert await reply(pools, path, fields) == expected
    seconds = pools.workers[1].requests
    assert seconds
    assert all(request.hold_s > 0 and not request.known for request in seconds)
    assert all(request.pull_plan[0].wait_s == 3.0 for request in seconds)
    await pools.wait_idle()


async def test_both_parts_are_closed_once(pools: Mesh) -> None:
    scripts(pools, plain(pools, pause_s=SLOW_S), plain(pools, prepare_s=3 * SLOW_S))
    assert (await pools.complete())["choices"][0]["text"] == ANSWER
    assert await outcomes(pools) == {1: OUTCOME_CANCELLED, 2: OUTCOME_OK}
    before, after = sorted(pools.router.dones, key=lambda done: done.attempt)
    assert before.ttft_s > 0
    assert after.ttft_s == 0.0
    assert before.output_tokens + after.output_tokens == len(pools.text.encode_text(ANSWER))
    assert [ask.can_hand_off for ask in pools.router.asks] == [True]


@pytest.mark.parametrize(
    "fault",
    [
        {"fail_before_admission": grpc.StatusCode.UNAVAILABLE},
        {"prefill_s": 0.05, "fail_after": 0},
        {"pause_s": SLOW_S, "fail_after": 2},
    ],
    ids=["before", "prefill", "decode"],
)
@pytest.mark.parametrize("prepare_s", [0.0, 0.3])
async def test_the_second_goes_on_for_a_first_that_dies(pools: Mesh, fault: dict[str, Any], prepare_s: float) -> None:
    scripts(pools, plain(pools, **fault), plain(pools, prepare_s=prepare_s))
    assert (await pools.complete())["choices"][0]["text"] == ANSWER
    ended = await outcomes(pools)
    assert ended[2] == OUTCOME_OK
    assert ended[1] in (OUTCOME_WORKER_FAILED, OUTCOME_CANCELLED)
    assert len(pools.router.asks) == 1


async def test_a_first_that_is_full_is_asked_for_again_with_both(pools: Mesh) -> None:
    first = [Script(stale=True), plain(pools, pause_s=SLOW_S)]
    scripts(pools, first[0], plain(pools, prepare_s=0.2))
    pools.workers[0].script = lambda _: first.pop(0) if len(first) > 1 else first[0]
    assert (await pools.complete())["choices"][0]["text"] == ANSWER
    ended = await outcomes(pools, 4)
    assert (ended[1], ended[2]) == (OUTCOME_STALE, OUTCOME_CANCELLED)
    assert [ask.attempt for ask in pools.router.asks] == [1, 3]


@pytest.mark.parametrize("fault", [{"fail_held": True}, {"fail_before_admission": grpc.StatusCode.UNAVAILABLE}])
async def test_the_first_goes_on_for_a_second_that_dies(pools: Mesh, fault: dict[str, Any]) -> None:
    scripts(pools, plain(pools, pause_s=SLOW_S / 3), plain(pools, **fault))
    assert (await pools.complete())["choices"][0]["text"] == ANSWER
    assert await outcomes(pools) == {1: OUTCOME_OK, 2: OUTCOME_WORKER_FAILED}


async def test_a_second_that_dies_makes_the_first_look_for_another(pools: Mesh) -> None:
    scripts(pools, plain(pools, pause_s=0.1), plain(pools, fail_held=True), plain(pools))
    pools.router.workers["w2"] = pools.router.workers["w1"]
    try:
        assert (await pools.complete())["choices"][0]["text"] == ANSWER
    finally:
        del pools.router.workers["w2"]
    assert await outcomes(pools, 3) == {1: OUTCOME_CANCELLED, 2: OUTCOME_WORKER_FAILED, 3: OUTCOME_OK}
    assert pools.router.asks[1].resumes


async def test_a_second_that_dies_after_the_switch_is_rescued(pools: Mesh) -> None:
    scripts(pools, plain(pools, pause_s=SLOW_S), plain(pools, prepare_s=SLOW_S, fail_after=1))
    assert (await pools.complete())["choices"][0]["text"] == ANSWER
    assert len(pools.router.asks) == 2
    assert pools.router.asks[1].resumes


@pytest.mark.parametrize("prefill_s", [30.0, 0.0], ids=["prefill", "decode"])
async def test_a_client_that_leaves_takes_both_along(pools: Mesh, prefill_s: float) -> None:
    scripts(pools, plain(pools, prefill_s=prefill_s, hang_after=3), plain(pools, prepare_s=30.0))
    call = asyncio.create_task(pools.complete())
    await eventually(lambda: all(worker.running for worker in pools.workers))
    call.cancel()
    await pools.wait_idle()
    assert await outcomes(pools) == {1: OUTCOME_CANCELLED, 2: OUTCOME_CANCELLED}


async def test_a_grant_that_comes_too_late_is_given_back_whole(pools: Mesh) -> None:
    scripts(pools, plain(pools), plain(pools))
    pools.router.mute = True
    call = asyncio.create_task(pools.complete())
    await eventually(lambda: pools.router.asks)
    call.cancel()
    await pools.wait_idle()
    ask, grant = pools.router.asks[0], pools.router._answer(pools.router.asks[0]).grant
    assert grant.handoff.attempt == ask.attempt + 1
    pools.gateway.router.give_back(grant)
    assert await outcomes(pools) == {1: OUTCOME_CANCELLED, 2: OUTCOME_CANCELLED}
