"""Grouping of neighbouring blocks: pure, against what it promises."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.transfer.ucx_groups import Extent, group_sizes, run_lengths, run_starts, span

_gaps = st.lists(st.tuples(st.sampled_from([0, 0, 0, 4096]), st.integers(1, 5)), min_size=1, max_size=40)


def _extents(gaps: list[tuple[int, int]]) -> list[Extent]:
    """Extents with these gaps before them and these sizes."""
    extents: list[Extent] = []
    position = 0
    for gap, size in gaps:
        extents.append((position + gap, size))
        position += gap + size
    return extents


@given(_gaps, _gaps, st.integers(0, 3), st.integers(1, 12))
def test_a_group_adjoins_at_both_ends(
    ours: list[tuple[int, int]], theirs: list[tuple[int, int]], first: int, max_bytes: int
) -> None:
    count = min(len(ours), len(theirs))
    here, there = _extents(ours)[:count], _extents(theirs)[:count]
    starts = run_starts(run_lengths(there), count)
    first = min(first, count - 1)
    sizes = group_sizes(here[first:], first, starts, max_bytes)
    assert sum(sizes) == count - first
    position = first
    for size in sizes:
        assert size >= 1
        for extents in (here, there):
            group = extents[position : position + size]
            assert all(a + n == b for (a, n), (b, _) in pairwise(group))
        assert size == 1 or sum(n for _, n in here[position : position + size]) <= max_bytes
        position += size


@given(_gaps)
def test_runs_are_as_long_as_they_can_be(gaps: list[tuple[int, int]]) -> None:
    lengths = run_lengths(_extents(gaps))
    starts = run_starts(lengths, len(gaps))
    assert starts == {0, *(i for i, (gap, _) in enumerate(gaps) if gap and i)}
    assert starts == {0, *list(accumulate(lengths))[:-1]}


@pytest.mark.parametrize(
    ("lengths", "starts"), [([], {0, 1, 2}), ([3], {0}), ([9], {0}), ([1, 1, 1, 5], {0, 1, 2}), ([2, 0], {0, 2})]
)
def test_what_a_puller_says_of_its_buffers_need_not_be_true(lengths: list[int], starts: set[int]) -> None:
    assert run_starts(lengths, 3) == starts


def test_memory_that_does_not_adjoin_has_no_span() -> None:
    with pytest.raises(ValueError, match="adjoin"):
        span([(4096, 10), (8192, 10)])
