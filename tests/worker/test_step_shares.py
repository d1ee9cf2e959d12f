"""Whose a step's time was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.step_costs import StepCosts
from services.worker.chunk import Chunk
from services.worker.step_fit import step_work
from services.worker.step_shares import charge_step

COSTS = StepCosts(0.001, 0.002, 1e-4, 1e-8, 0.0005, 1e-7)


def chunks_of(sizes: list[tuple[int, int, int]]) -> tuple[list[Chunk], list[Any]]:
    """Chunks of (start, length, drafted), and their requests."""
    requests = [SimpleNamespace(accelerator_s=0.0) for _ in sizes]
    made = [
        SimpleNamespace(start=start, length=length, drafted=drafted, sequence=SimpleNamespace(request=request))
        for (start, length, drafted), request in zip(sizes, requests, strict=True)
    ]
    return cast("list[Chunk]", made), requests


SIZES = st.tuples(st.integers(0, 4000), st.integers(1, 512), st.integers(0, 8))


@given(
    st.lists(SIZES, min_size=1, max_size=40),
    st.floats(1e-6, 10.0),
    st.sampled_from((COSTS, StepCosts(0.1, 0.1, 0, 0, 0, 0), StepCosts(0, 0, 0, 0, 0.01, 0))),
)
def test_the_parts_are_the_whole_step(sizes: list[tuple[int, int, int]], step_s: float, costs: StepCosts) -> None:
    chunks, requests = chunks_of(sizes)
    charge_step(chunks, costs, step_s)
    assert sum(request.accelerator_s for request in requests) == pytest.approx(step_s)
    assert all(request.accelerator_s >= 0 for request in requests)


def test_a_part_is_what_the_model_of_costs_says_that_the_chunk_adds() -> None:
    # A prompt, two that decode, and one that decodes with three guesses.
    chunks, requests = chunks_of([(0, 256, 0), (100, 1, 0), (2000, 1, 0), (500, 4, 3)])
    charge_step(chunks, COSTS, 1.0)
    own = [COSTS.seconds(step_work([chunk])) - COSTS.fixed_s for chunk in chunks]
    own = [added - (COSTS.decoding_s if number else 0.0) for number, added in enumerate(own)]
    assert [request.accelerator_s for request in requests] == pytest.approx([part / sum(own) for part in own])
