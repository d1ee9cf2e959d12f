"""Which gaps between tokens count as beside a form, and what a round makes of them."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from bench.structured_pace import Pace, Span, exploding_schemas, report, split

MOMENTS = st.lists(st.integers(0, 60), min_size=2, max_size=12, unique=True).map(sorted)
WHOLES = st.tuples(st.integers(0, 30), st.integers(31, 60))


def spans(moments: list[int]) -> list[Span]:
    """Disjoint ones."""
    return list(zip(moments[::2], moments[1::2], strict=False))


@given(
    st.lists(MOMENTS, min_size=1, max_size=3), MOMENTS.map(spans), st.tuples(st.integers(0, 30), st.integers(31, 60))
)
def test_each_gap_counts_once_and_as_calm_only_where_no_form_was_asked_for(
    times: list[list[int]], windows: list[Span], whole: Span
) -> None:
    calm, beside = split(times, windows, whole)
    within = [gap for one in times for gap in pairwise(one) if whole[0] <= gap[0] and gap[1] <= whole[1]]
    assert sorted(calm + beside) == sorted(after - before for before, after in within)
    asked_during = [any(begin <= moment < end for begin, end in windows) for moment in range(61)]
    disturbed = [after - before for before, after in within if any(asked_during[before:after])]
    assert beside == sorted(disturbed)


def test_a_gap_that_begins_before_a_form_and_ends_within_is_one_beside_it() -> None:
    assert split([[0.0, 1.0, 3.0, 4.0]], [(2.0, 2.5)], (0.0, 4.0)) == ([1.0, 1.0], [2.0])


def test_the_ratios_of_the_rounds_are_told_with_their_spread_and_what_the_load_waited() -> None:
    rounds = [Pace([0.02] * 10, [0.02 * times] * 10, waited_share=times / 100) for times in (1.0, 3.0, 2.0)]
    lines = list(report(rounds))
    assert "p99 2.000 (1.000 to 3.000) times the calm one" in lines
    assert lines[-1] == "the load waited for a core for 2.0% of a round (at most 3.0%)"
    assert "p99 40.00 ms (medians of the rounds), p99 of all 60.00 ms" in lines[1]


def test_no_form_is_asked_for_twice() -> None:
    schemas = exploding_schemas()
    assert len({next(schemas) for _ in range(100)}) == 100
