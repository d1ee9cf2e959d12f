"""What routers tell of models whose workers differ."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from services.router.catalog import list_models
from tests.router.scenes import IDENTITY, IDLE, NOW_S, Scene

POOLINGS = st.sampled_from(["", "none", "mean", "last"])


def pooling_of(workers: list[tuple[str, bool]]) -> str:
    """Of one model, with workers of which each has a pooling and is ready or not."""
    scene = Scene()
    for number, (pooling, is_ready) in enumerate(workers):
        scene.worker(f"w{number}", replace(IDLE, ready=is_ready), replace(IDENTITY, pooling=pooling))
    (entry,) = list_models(scene.table, scene.table.serving(NOW_S))
    assert entry.ready_replicas == sum(is_ready for _, is_ready in workers)
    return entry.pooling


def test_embeddings_come_from_the_kind_that_most_ready_replicas_are_of() -> None:
    assert pooling_of([("mean", True), ("last", True), ("last", True)]) == "last"
    assert pooling_of([("mean", True), ("last", False), ("last", False)]) == "mean"
    assert pooling_of([("none", True), ("none", True), ("mean", True)]) == "mean"
    assert pooling_of([("mean", True), ("last", True)]) == "last"
    assert pooling_of([("none", True)]) == "none"
    # Who does not tell may make them all the same.
    assert pooling_of([("none", True), ("none", True), ("", False)]) == ""


@given(st.lists(st.tuples(POOLINGS, st.booleans()), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_every_router_tells_the_same_kind_and_one_that_is_there(workers: list[tuple[str, bool]], rng: Random) -> None:
    told = pooling_of(workers)
    kinds = {pooling for pooling, _ in workers}
    assert told in kinds
    assert (told in ("mean", "last")) == bool(kinds & {"mean", "last"})
    assert pooling_of(rng.sample(workers, len(workers))) == told
