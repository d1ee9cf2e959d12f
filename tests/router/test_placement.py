"""Decisions: what every policy must keep, and what the default one prefers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.domain import Placement, RefusalReason, Refused, WorkerId
from services.router.explanations import Candidates
from services.router.policies import POLICIES
from services.router.policies.view import rendezvous
from tests.router.scenes import IDENTITY, IDLE, NOW_S, Scene, chain, links

policies = pytest.mark.parametrize("policy", POLICIES)


@settings(max_examples=150)
@given(
    st.sampled_from(list(POLICIES)),
    st.lists(
        st.sampled_from(["ok", "draining", "unready", "silent", "broken", "stalled", "other", "excluded", "small"]),
        min_size=1,
        max_size=8,
    ),
    st.data(),
)
def test_only_workers_that_can_serve_are_chosen(policy: str, kinds: list[str], data: st.DataObject) -> None:
    scene = Scene(policy=policy)
    ids = chain(8)
    now_s = NOW_S + 2
    for number, kind in enumerate(kinds):
        name = f"w{number}"
        busy = replace(IDLE, running_requests=data.draw(st.integers(0, 20)), queued_prefill_tokens=number * 50)
        load = replace(busy, draining=kind == "draining", ready=kind != "unready", progress=1)
        identity = IDENTITY
        if kind == "other":
            identity = replace(IDENTITY, model_digest=b"o" * 16)
        if kind == "small":
            identity = replace(IDENTITY, context_length=100)
        scene.worker(name, load, identity)
        scene.hold(f"worker/{name}", ids[: data.draw(st.integers(0, 8))])
        if kind != "silent":
            scene.table.report(WorkerId(name), replace(load, progress=1 if kind == "stalled" else 2), now_s)
        if kind == "stalled":
            scene.table.report(WorkerId(name), replace(load, running_requests=3), now_s)
            scene.table.rows["moved_s"][scene.table.workers[WorkerId(name)].row] = NOW_S
        if kind == "broken":
            scene.table.broken(WorkerId(name))
    excluded = frozenset(f"w{number}" for number, kind in enumerate(kinds) if kind == "excluded")
    answer = scene.place(scene.ask(ids, excluded_workers=excluded), now_s)
    able = {f"w{number}" for number, kind in enumerate(kinds) if kind == "ok"}
    if isinstance(answer, Placement):
        assert answer.worker_id in able
    else:
        assert not able
        assert answer.reason in (RefusalReason.NO_WORKER, RefusalReason.UNKNOWN_MODEL, RefusalReason.TOO_LARGE)
        assert answer.retry_after_s > 0


@policies
def test_equal_workers_share_the_load(policy: str) -> None:
    scene = Scene(policy=policy)
    for number in range(4):
        scene.worker(f"w{number}")
    counts = Counter(scene.grant(scene.ask(chain(4)), count=True).worker_id for _ in range(80))
    assert len(counts) == 4
    assert max(counts.values()) <= 30


@policies
def test_one_system_prompt_for_all_does_not_send_all_to_one_worker(policy: str) -> None:
    scene = Scene(policy=policy)
    shared = chain(64)
    for number in range(4):
        scene.worker(f"w{number}")
    scene.hold("worker/w0", shared)
    counts = Counter(scene.grant(scene.ask([*shared, *chain(4)]), count=True).worker_id for _ in range(60))
    assert len(counts) == 4
    assert max(counts.values()) <= 30


@given(st.integers(1, 30), st.integers(0, 30))
def test_the_longer_prefix_wins_when_loads_are_equal(longer: int, shorter: int) -> None:
    scene = Scene()
    ids = chain(32)
    slow_links = links("worker/a", "worker/b", "worker/c", bytes_per_s=1e3)
    for name in ("a", "b", "c"):
        scene.worker(name, slow_links)
    scene.hold("worker/b", ids[: min(shorter, longer - 1)])
    scene.hold("worker/c", ids[:longer])
    grant = scene.grant(scene.ask(ids))
    assert grant.worker_id == "c"
    assert grant.local_blocks == longer
    assert not grant.pull_plan


def test_a_fast_link_pulls_and_a_slow_one_computes() -> None:
    for bytes_per_s, pulls in ((1e9, True), (1e6, False)):
        scene = Scene()
        ids = chain(40)
        scene.worker("a", links("kvstore/k", bytes_per_s=bytes_per_s))
        scene.kvstore("k")
        scene.hold("kvstore/k", ids)
        grant = scene.grant(scene.ask(ids))
        planned = [(run.kind, run.location_id, run.first_block, run.num_blocks) for run in grant.pull_plan]
        assert planned == ([("kvstore", "k", 0, 40)] if pulls else [])


def test_a_plan_joins_holders_in_order() -> None:
    scene = Scene()
    ids = chain(40)
    slow = links("worker/b", bytes_per_s=60e6).holders
    scene.worker("a", replace(IDLE, holders=(*links("kvstore/k").holders, *slow)))
    scene.worker("b", replace(IDLE, running_requests=16, waiting_requests=20, queued_prefill_tokens=8000))
    scene.kvstore("k")
    scene.hold("worker/a", ids[:5])
    scene.hold("kvstore/k", ids[:20])
    scene.hold("worker/b", ids)
    grant = scene.grant(scene.ask(ids))
    assert grant.worker_id == "a"
    assert [(run.kind, run.first_block, run.num_blocks) for run in grant.pull_plan] == [
        ("kvstore", 5, 15),
        ("worker", 20, 20),
    ]


def test_the_last_token_is_always_computed() -> None:
    scene = Scene()
    ids = chain(4)
    scene.worker("a")
    scene.hold("worker/a", ids)
    grant = scene.grant(scene.ask(ids, tokens=64))
    assert (grant.local_blocks, grant.prefill_tokens) == (3, 16)


@pytest.mark.parametrize(("address", "pulls"), [("a:2", 1), ("", 0)])
def test_only_who_serves_pulls_is_pulled_from(address: str, pulls: int) -> None:
    scene = Scene()
    ids = chain(40)
    scene.worker("a", replace(IDLE, queued_prefill_tokens=5_000), pull_address=address)
    scene.worker("b", links("worker/a", bytes_per_s=1e9))
    scene.hold("worker/a", ids)
    grant = scene.grant(scene.ask(ids))
    assert (grant.worker_id, len(grant.pull_plan)) == ("b", pulls)


def test_a_holder_of_another_epoch_is_no_holder() -> None:
    scene = Scene()
    ids = chain(8)
    scene.worker("a")
    scene.kvstore("k")
    scene.hold("kvstore/k", ids)
    scene.kvstores["k"] = scene.kvstores["k"].__class__(
        kind="kvstore", id="k", epoch=2, host="h", grpc_address="k:1", pull_address="k:2"
    )
    scene.holders.changed()
    assert not scene.grant(scene.ask(ids)).pull_plan


def test_a_near_holder_is_preferred() -> None:
    scene = Scene()
    ids = chain(20)
    scene.worker("a", host="here")
    for name, host in (("far", "there"), ("near", "here")):
        scene.kvstore(name, host=host)
        scene.hold(f"kvstore/{name}", ids)
    assert {scene.grant(scene.ask(ids)).pull_plan[0].location_id for _ in range(4)} == {"near"}


@pytest.mark.parametrize("host", ["h", "another"])
def test_two_nodes_with_the_same_prefix_share_the_pulls(host: str) -> None:
    scene = Scene()
    ids = chain(20)
    for number in range(4):
        scene.worker(f"w{number}")
    for name in ("k1", "k2"):
        scene.kvstore(name, host=host)
        scene.hold(f"kvstore/{name}", ids)
    plans = [scene.grant(scene.ask(ids), count=True).pull_plan for _ in range(12)]
    counts = Counter(plan[0].location_id for plan in plans if plan)
    assert set(counts) == {"k1", "k2"}
    assert abs(counts["k1"] - counts["k2"]) <= 2, "the one that less was granted from lately"


def test_a_busy_node_gives_way_to_another_with_the_same_prefix() -> None:
    scene = Scene()
    ids = chain(20)
    scene.worker("puller", links("kvstore/k1", in_flight_bytes=1e9))
    scene.worker("a", links("kvstore/k1", "kvstore/k2"))
    for name in ("k1", "k2"):
        scene.kvstore(name, host="another")
        scene.hold(f"kvstore/{name}", ids)
    ask = scene.ask(ids, excluded_workers=frozenset({"puller"}))
    assert {scene.grant(ask).pull_plan[0].location_id for _ in range(4)} == {"k2"}


def test_a_new_copy_is_tried_beside_a_node_that_is_known_to_be_fast() -> None:
    scene = Scene()
    ids = chain(20)
    scene.worker("a", links("kvstore/k1", bytes_per_s=5e9, setup_s=0.001))
    for name in ("k1", "k2"):
        scene.kvstore(name, host="another")
        scene.hold(f"kvstore/{name}", ids)
    assert {scene.grant(scene.ask(ids)).pull_plan[0].location_id for _ in range(4)} == {"k1", "k2"}
    scene.kvstore("k3", host="h")
    scene.hold("kvstore/k3", ids)
    # What is known of links to other hosts says nothing of those on this one.
    assert {scene.grant(scene.ask(ids)).pull_plan[0].location_id for _ in range(6)} == {"k1", "k2"}


def test_an_overfull_cache_holder_loses_to_an_idle_worker() -> None:
    scene = Scene()
    ids = chain(10)
    scene.worker("holder", replace(IDLE, queued_prefill_tokens=4000, waiting_requests=4))
    scene.worker("idle")
    scene.hold("worker/holder", ids)
    grant = scene.grant(scene.ask(ids))
    assert grant.worker_id == "idle"
    assert grant.pull_plan[0].location_id == "holder"


def test_a_crowded_batch_loses_to_an_empty_one() -> None:
    scene = Scene()
    scene.worker("crowded", replace(IDLE, running_requests=15, decoding_sequences=15, decode_step_s=0.06))
    scene.worker("idle")
    assert {scene.grant(scene.ask(chain(4))).worker_id for _ in range(10)} == {"idle"}


def test_refusals_say_why() -> None:
    scene = Scene(max_queue_s=2.0)
    assert scene.refusal(scene.ask([], tokens=5)).reason is RefusalReason.UNKNOWN_MODEL
    scene.worker("a", replace(IDLE, ready=False))
    assert scene.refusal(scene.ask([], tokens=5)).reason is RefusalReason.NO_WORKER
    assert scene.refusal(scene.ask([], tokens=5, model="other")).reason is RefusalReason.UNKNOWN_MODEL
    assert scene.refusal(scene.ask([], tokens=5, model_digest=b"x")).reason is RefusalReason.NO_WORKER
    scene.worker("b", replace(IDLE, queued_prefill_tokens=10_000))
    overloaded = scene.refusal(scene.ask([], tokens=5))
    assert overloaded.reason is RefusalReason.OVERLOADED
    assert overloaded.retry_after_s >= 1
    scene.table.report(WorkerId("b"), replace(IDLE, queued_prefill_tokens=2000), NOW_S)
    assert scene.refusal(scene.ask([], tokens=5, deadline_s=0.5)).reason is RefusalReason.DEADLINE
    assert isinstance(scene.place(scene.ask([], tokens=5, deadline_s=5.0)), Placement)


def test_without_an_index_the_prefix_decides_within_bounds() -> None:
    scene = Scene()
    for number in range(4):
        scene.worker(f"w{number}")
    ids = chain(20)
    answers = [scene.placer.place(scene.ask(ids), NOW_S, index_usable=False) for _ in range(3)]
    assert all(isinstance(answer, Placement) and answer.policy == "prefix_hash" for answer in answers)
    assert len({answer.worker_id for answer in answers if isinstance(answer, Placement)}) == 1


def test_a_worker_that_leaves_moves_only_its_own_keys() -> None:
    names = np.random.default_rng(1).integers(0, 2**63, 20).astype(np.uint64)
    keys = range(0, 2**62, 2**52)
    before = [int(names[rendezvous(names, key).argmax()]) for key in keys]
    after = [int(names[1:][rendezvous(names[1:], key).argmax()]) for key in keys]
    assert all(old == new for old, new in zip(before, after, strict=True) if old != names[0])
    assert max(Counter(before).values()) < 3 * len(before) / 20


def test_the_explanation_adds_up() -> None:
    scene = Scene()
    scene.worker("a", replace(IDLE, queued_prefill_tokens=100, decoding_sequences=2, running_requests=2))
    scene.worker("b", replace(IDLE, queued_prefill_tokens=500))
    grant = scene.grant(scene.ask(chain(4)))
    best, *_ = Candidates.of(grant.explanation, scene.table.by_row).workers
    assert best == grant.worker_id
    terms = grant.explanation.terms
    totals = terms["queue_s"] + terms["pull_s"] + terms["prefill_s"] + terms["interference_s"]
    assert totals[grant.explanation.chosen] == pytest.approx(grant.predicted_ttft_s)
    assert np.allclose(grant.explanation.scores, totals + terms["harm_s"])


def test_a_refused_request_counts_nothing() -> None:
    scene = Scene()
    scene.worker("a", replace(IDLE, ready=False))
    answer = scene.place(scene.ask(chain(1)), count=True)
    assert isinstance(answer, Refused)
    assert not scene.table.rows["pending"].any()


def test_conversations_stay_with_their_prefix_or_take_it_along() -> None:
    scene = Scene()
    for name in ("a", "b"):
        scene.worker(name)
    held: dict[str, set[bytes]] = {"a": set(), "b": set()}
    histories = [chain(12) for _ in range(8)]
    reusable = reused = 0
    places: dict[int, set[str]] = {}
    for turn in range(5):
        for number, ids in enumerate(histories):
            load = {name: replace(IDLE, running_requests=3, decoding_sequences=3) for name in held}
            for name in held:
                scene.table.report(WorkerId(name), load[name], NOW_S)
            grant = scene.grant(scene.ask(ids), count=True)
            known = 0 if turn == 0 else len(ids) - 8
            reusable += known
            reused += min(known, grant.local_blocks + sum(run.num_blocks for run in grant.pull_plan))
            places.setdefault(number, set()).add(grant.worker_id)
            ids.extend(chain(8))
            fresh = [id_ for id_ in ids if id_ not in held[grant.worker_id]]
            held[grant.worker_id].update(fresh)
            scene.hold(f"worker/{grant.worker_id}", fresh)
    assert reused >= 0.95 * reusable
    assert sum(len(workers) == 1 for workers in places.values()) >= 6
    assert len(set.union(*places.values())) == 2
