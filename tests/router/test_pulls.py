"""Which pulls are planned: never a slower one, never worse with a better link, and the best of all that there are."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.announcements import Tier
from services.common.links import FAR, NEAR, SSD, Link, faded
from services.router.domain import AttemptId, HolderLinks, MeasuredLink, Placement, WorkerId
from services.router.link_table import LinkTable
from services.router.policies.pulls import best_plans
from services.router.policies.view import WORKER_ROW, LinkArrays, PolicyRequest, PolicyView, Sources, idle
from services.router.worker_state import PendingAttempt
from tests.router.scenes import IDENTITY, IDLE, NOW_S, Scene, chain, links

BLOCK_TOKENS, BLOCK_BYTES = 16, 400_000.0
REQUEST = PolicyRequest(
    prompt_tokens=40 * BLOCK_TOKENS + 5,
    block_tokens=BLOCK_TOKENS,
    num_choices=1,
    expected_output_tokens=10.0,
    prefix_key=1,
    sequence=1,
)
STEP_TOKENS, FIXED_S = 256, 0.02


@dataclass(frozen=True)
class Holder:
    """One source as one candidate sees it."""

    end: int
    memory_end: int
    queue_bytes: float
    rate: float
    setup_s: float
    ssd_rate: float
    ssd_setup_s: float

    def seconds(self, begin: int, end: int) -> float:
        """Pulling blocks [begin, end)."""
        in_memory, on_ssd = max(0, min(end, self.memory_end) - begin), max(0, end - max(begin, self.memory_end))
        fixed_s = self.setup_s + self.queue_bytes / self.rate + (self.ssd_setup_s if on_ssd else 0.0)
        return fixed_s + in_memory * BLOCK_BYTES / self.rate + on_ssd * BLOCK_BYTES / self.ssd_rate


holders = st.builds(
    lambda end, share, *rest: Holder(end, int(end * share), *rest),
    st.integers(1, 45),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([0.0, 0.0, 1e7, 1e9]),
    st.floats(1e6, 1e10),
    st.floats(0.0001, 0.2),
    st.floats(1e6, 1e10),
    st.floats(0.0001, 0.2),
)


def view_of(sources: list[Holder], local: int, tokens_per_s: float) -> PolicyView:
    rows = np.zeros(1, WORKER_ROW)
    rows["block_bytes"], rows["prefill_token_s"] = BLOCK_BYTES, 1 / tokens_per_s
    rows["step_tokens"], rows["fixed_s"] = STEP_TOKENS, FIXED_S

    def column(name: str) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        return np.array([[getattr(source, name)] for source in sources], np.float64)

    return PolicyView(
        rows,
        np.array([local]),
        Sources(
            end=np.array([source.end for source in sources]),
            memory_end=np.array([source.memory_end for source in sources]),
            queue_bytes=column("queue_bytes")[:, 0],
            is_self=np.zeros((len(sources), 1), np.bool_),
            links=LinkArrays(column("rate"), column("setup_s"), column("ssd_rate"), column("ssd_setup_s")),
        ),
        idle(1),
    )


def prefill_s(held: int, tokens_per_s: float) -> float:
    tokens = REQUEST.prompt_tokens - held * BLOCK_TOKENS
    return tokens / tokens_per_s + math.ceil(tokens / STEP_TOKENS) * FIXED_S


def best_by_hand(sources: list[Holder], local: int, tokens_per_s: float) -> float:
    """Time to the end of prefill, with the best plan of up to two runs, which end with a source or its memory."""
    usable = REQUEST.usable_blocks
    ends = [(one, min(end, usable)) for one in sources for end in {one.end, one.memory_end}]
    best = prefill_s(local, tokens_per_s)
    for one, end in ends:
        if end > local:
            best = min(best, one.seconds(local, end) + prefill_s(end, tokens_per_s))
    for (one, middle), (other, end) in itertools.product(ends, ends):
        if local < middle < end:
            seconds = one.seconds(local, middle) + other.seconds(middle, end)
            best = min(best, seconds + prefill_s(end, tokens_per_s))
    return best


some = st.lists(holders, min_size=1, max_size=5)
local = st.integers(0, 40)
speed = st.floats(200, 50_000)


@settings(max_examples=200)
@given(some, local, speed)
def test_the_plan_is_the_best_and_never_slower_than_computing(
    sources: list[Holder], local: int, tokens_per_s: float
) -> None:
    plans = best_plans(REQUEST, view_of(sources, local, tokens_per_s))
    total_s = float(plans.seconds[0] + plans.prefill_s[0])
    assert total_s <= prefill_s(local, tokens_per_s) + 1e-9
    assert float(plans.alone_s[0]) == pytest.approx(prefill_s(local, tokens_per_s))
    assert total_s == pytest.approx(best_by_hand(sources, local, tokens_per_s))
    # And it is what it says.
    seconds, at = 0.0, local
    for source, first, end in plans.runs(0):
        assert first == at < end <= min(sources[source].end, REQUEST.usable_blocks)
        seconds, at = seconds + sources[source].seconds(first, end), end
    assert int(plans.end[0]) == at
    assert float(plans.seconds[0]) == pytest.approx(seconds, abs=1e-9)
    assert float(plans.prefill_s[0]) == pytest.approx(prefill_s(at, tokens_per_s))


@settings(max_examples=200)
@given(some, local, speed, st.floats(1.0, 100.0), st.data())
def test_a_better_link_never_makes_it_slower(
    sources: list[Holder], local: int, tokens_per_s: float, factor: float, data: st.DataObject
) -> None:
    better = list(sources)
    at = data.draw(st.integers(0, len(sources) - 1))
    changed = data.draw(st.sampled_from(["rate", "ssd_rate", "setup_s", "ssd_setup_s", "queue_bytes"]))
    value = getattr(sources[at], changed)
    better[at] = replace(sources[at], **{changed: value * factor if "rate" in changed else value / factor})
    before, after = (best_plans(REQUEST, view_of(these, local, tokens_per_s)) for these in (sources, better))
    assert after.seconds[0] + after.prefill_s[0] <= (before.seconds[0] + before.prefill_s[0]) * (1 + 1e-9)


def test_candidates_are_scored_together_as_alone() -> None:
    scene, ids = Scene(), chain(40)
    speeds = {"a": 1e8, "b": 1e7, "c": 3e9}
    for name, bytes_per_s in speeds.items():
        scene.worker(name, links("kvstore/k", bytes_per_s=bytes_per_s))
    scene.kvstore("k")
    scene.hold("kvstore/k", ids, Tier.RAM)
    together = scene.grant(scene.ask(ids)).explanation
    for name in speeds:
        alone = scene.grant(scene.ask(ids, excluded_workers=frozenset(speeds) - {name}))
        row = int(np.flatnonzero(together.candidates == scene.table.workers[WorkerId(name)].row)[0])
        assert together.scores[row] == pytest.approx(alone.explanation.scores[0])


def runs(placement: Placement) -> list[tuple[str, int, int, int]]:
    return [(run.location_id, run.first_block, run.num_blocks, run.num_ssd_blocks) for run in placement.pull_plan]


def test_the_ssd_counts_apart() -> None:
    for ssd_rate, expected in ((1e9, [("k", 0, 40, 25)]), (1e7, [("k", 0, 15, 0)])):
        scene, ids = Scene(), chain(40)
        scene.worker("a", links("kvstore/k", ssd_bytes_per_s=ssd_rate))
        scene.kvstore("k")
        scene.hold("kvstore/k", ids[:15], Tier.RAM)
        scene.hold("kvstore/k", ids[15:], Tier.SSD)
        grant = scene.grant(scene.ask(ids))
        assert runs(grant) == expected
        terms = grant.explanation.terms
        assert terms["saved_prefill_s"][0] > terms["pull_s"][0] > 0


def test_memory_far_away_may_beat_an_ssd_here() -> None:
    scene, ids = Scene(), chain(40)
    scene.worker("a", links("kvstore/near", ssd_bytes_per_s=5e7), host="h")
    scene.kvstore("near", host="h")
    scene.kvstore("far", host="there")
    scene.hold("kvstore/near", ids, Tier.SSD)
    scene.hold("kvstore/far", ids, Tier.RAM)
    assert runs(scene.grant(scene.ask(ids))) == [("far", 0, 40, 0)]


def test_a_busy_holder_is_left_to_others() -> None:
    scene, ids = Scene(), chain(40)
    scene.worker("a")
    for name in ("k", "l"):
        scene.kvstore(name)
        scene.hold(f"kvstore/{name}", ids, Tier.RAM)
    pulling = HolderLinks("kvstore/k@1", in_flight_bytes=500e6)
    # Another worker says that it pulls a lot from k.
    scene.worker("b", replace(IDLE, holders=(pulling,), running_requests=16, waiting_requests=9))
    grant = scene.grant(scene.ask(ids))
    assert runs(grant) == [("l", 0, 40, 0)]
    assert grant.explanation.terms["pull_queue_s"].max() == 0
    # What this router has just granted counts as well, until it is over.
    attempt = AttemptId("r", 1)
    scene.table.grant(WorkerId("a"), attempt, PendingAttempt(1, 1, NOW_S, (("kvstore/l@1", 900e6),)))
    busy = scene.grant(scene.ask(ids))
    assert runs(busy) == [("k", 0, 40, 0)]
    assert busy.explanation.terms["pull_queue_s"][busy.explanation.chosen] == pytest.approx(500e6 / NEAR.bytes_per_s)
    scene.table.report(WorkerId("a"), replace(IDLE, admitted=("r/1",)), NOW_S)
    assert runs(scene.grant(scene.ask(ids))) == [("l", 0, 40, 0)]


def test_grants_spread_over_equal_holders() -> None:
    scene, ids = Scene(), chain(40)
    scene.worker("a")
    for name in ("k", "l", "m"):
        scene.kvstore(name)
        scene.hold(f"kvstore/{name}", ids, Tier.RAM)
    assert {runs(scene.grant(scene.ask(ids)))[0][0] for _ in range(6)} == {"k", "l", "m"}


def test_figures_of_a_pair_are_its_own_and_fade() -> None:
    scene, ids = Scene(), chain(40)
    scene.worker("a", links("kvstore/k", bytes_per_s=1e6))
    scene.kvstore("k", host="there")
    scene.hold("kvstore/k", ids, Tier.RAM)
    assert not scene.grant(scene.ask(ids)).pull_plan
    # 40 blocks of 400 kB in a third of a second: 50 MB/s.
    crossing = np.log(FAR.bytes_per_s / 50e6) / np.log(FAR.bytes_per_s / 1e6)
    for freshness, pulled in ((crossing * 1.1, False), (crossing * 0.9, True)):
        scene.table.report(WorkerId("a"), links("kvstore/k", bytes_per_s=1e6, freshness=freshness), NOW_S)
        assert bool(scene.grant(scene.ask(ids)).pull_plan) == pulled
    # A good figure does not fade.
    scene.table.report(WorkerId("a"), links("kvstore/k", bytes_per_s=9e9, setup_s=0.001, freshness=0.0), NOW_S)
    assert scene.grant(scene.ask(ids)).explanation.terms["pull_s"][0] == pytest.approx(0.001 + 40 * 4e5 / 9e9)
    # Another worker knows nothing of it.
    scene.worker("b")
    scene.table.report(WorkerId("a"), links("kvstore/k", bytes_per_s=1e6), NOW_S)
    assert scene.grant(scene.ask(ids)).worker_id == "b"


@given(st.floats(1e6, 1e10), st.floats(0.0001, 0.5), st.floats(1e6, 1e10), st.floats(0.001, 1.0))
def test_routers_fade_figures_as_workers_do(
    bytes_per_s: float, setup_s: float, ssd_bytes_per_s: float, freshness: float
) -> None:
    table = LinkTable()
    memory = MeasuredLink(bytes_per_s, setup_s, freshness)
    table.report(0, (HolderLinks("k", memory, MeasuredLink(ssd_bytes_per_s, setup_s, freshness)),))
    found = table.links(np.zeros(1, np.int64), ["k"], np.ones((1, 1), np.bool_), np.zeros(1))
    near = faded(Link(bytes_per_s, setup_s), NEAR, freshness)
    ssd = faded(Link(ssd_bytes_per_s, setup_s), SSD, freshness)
    assert found.bytes_per_s[0, 0] == pytest.approx(near.bytes_per_s)
    assert found.setup_s[0, 0] == pytest.approx(near.setup_s)
    assert found.ssd_bytes_per_s[0, 0] == pytest.approx(ssd.bytes_per_s)
    assert found.ssd_setup_s[0, 0] == pytest.approx(ssd.setup_s)


@given(st.floats(100.0, 1e6), st.sampled_from(["h", "far"]), st.booleans())
def test_a_link_that_nobody_has_measured_is_tried_however_fast_a_worker_computes(
    tokens_per_s: float, host: str, on_ssd: bool
) -> None:
    scene, ids = Scene(), chain(400)
    identity = replace(IDENTITY, context_length=100_000, prefill_tokens_per_s=tokens_per_s, decode_step_s=1e-4)
    scene.worker("a", replace(IDLE, prefill_tokens_per_s=tokens_per_s), identity)
    scene.kvstore("k", host=host)
    scene.hold("kvstore/k", ids, Tier.SSD if on_ssd else Tier.RAM)
    computing_s = 400 * BLOCK_TOKENS / tokens_per_s
    # Setup is assumed too: what is computed within it is not worth a pull.
    if computing_s / 2 > 2 * (FAR.setup_s + SSD.setup_s):
        assert scene.grant(scene.ask(ids)).pull_plan


def test_nobody_has_links_where_nobody_asks() -> None:
    table = LinkTable()
    table.report(0, (HolderLinks("k", MeasuredLink(1e9, 0.001)),))
    assert table.links(np.zeros(0, np.int64), ["k"], np.ones((1, 0), np.bool_), np.zeros(0)).bytes_per_s.shape == (1, 0)


def test_no_figures_stay_of_what_is_no_longer_reported() -> None:
    scene = Scene()
    both = replace(
        IDLE, holders=(HolderLinks("kvstore/k@1", MeasuredLink(1e6, 1.0), None, 5.0), *links("kvstore/l").holders)
    )
    for name in ("a", "b"):
        scene.worker(name, both)
    table = scene.table.links
    assert table.num_holders == 2
    assert table.queue_bytes(["kvstore/k@1", "kvstore/l@1"]).tolist() == [10.0, 0.0]
    scene.table.report(WorkerId("a"), IDLE, NOW_S)
    rows = np.array([scene.table.workers[WorkerId(name)].row for name in ("a", "b")])
    same_host = np.ones((1, 2), np.bool_)
    assert table.links(rows, ["kvstore/k@1"], same_host, np.zeros(2)).bytes_per_s[0].tolist() == [NEAR.bytes_per_s, 1e6]
    scene.table.grant(WorkerId("b"), AttemptId("r", 1), PendingAttempt(1, 1, NOW_S, (("kvstore/k@1", 7.0),)))
    assert table.queue_bytes(["kvstore/k@1"])[0] == 12.0
    scene.table.forget(WorkerId("b"))
    assert table.num_holders == 0
    assert table.queue_bytes(["kvstore/k@1"])[0] == 0.0


def test_a_node_that_has_started_anew_is_pulled_from_again() -> None:
    scene, ids = Scene(), chain(40)
    slow = replace(IDLE, holders=(HolderLinks("kvstore/k@0", MeasuredLink(1e4, 1.0)),))
    scene.worker("a", slow)
    scene.kvstore("k")
    scene.hold("kvstore/k", ids, Tier.RAM)
    assert runs(scene.grant(scene.ask(ids))) == [("k", 0, 40, 0)]
    scene.table.report(
        WorkerId("a"), replace(IDLE, holders=(HolderLinks("kvstore/k@1", slow.holders[0].memory),)), NOW_S
    )
    assert runs(scene.grant(scene.ask(ids))) == []
