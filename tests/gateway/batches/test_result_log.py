"""A batch's results through torn writes, writers that were taken over, takers that come at once: one answer a line."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.batches.result_log import (
    Counts,
    Results,
    ResultWriter,
    Superseded,
    begin_generation,
    generations,
    log_path,
)

LINES = 12
# What a run does next: answer a line, write as one that was taken over, lose the end of a write, be taken over.
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("answer"), st.integers(0, LINES - 1)),
        st.tuples(st.just("late"), st.integers(0, LINES - 1)),
        st.tuples(st.just("torn"), st.binary(min_size=1, max_size=40)),
        st.tuples(st.just("take_over"), st.none()),
    ),
    max_size=20,
)


def payload(number: int, writer: str) -> bytes:
    return json.dumps({"line": number, "writer": writer}).encode()


def read(folder: Path) -> dict[int, bytes]:
    """What a fresh reader finds."""
    results = Results(folder)
    results.refresh()
    return {number: results.payload(answer) for number, answer in results.answers.items()}


def append_past_the_check(folder: Path, generation: int, number: int) -> None:
    """As a writer does that was stopped between its look for a successor and its write."""
    other = folder / "elsewhere"
    other.mkdir(exist_ok=True)
    source = log_path(other, generation)
    source.write_bytes(b"")
    writer = ResultWriter(other, generation)
    writer.append(number, payload(number, "late"), is_ok=True)
    writer.close()
    with log_path(folder, generation).open("ab") as log:
        log.write(source.read_bytes())


@settings(max_examples=40, deadline=None)
@given(steps=STEPS)
def test_a_line_that_counts_counts_for_ever_and_once(steps: list[tuple[str, object]]) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        results, writer = begin_generation(folder)
        expected: dict[int, bytes] = {}
        counts = Counts(folder)
        is_torn = False
        for kind, value in steps:
            if kind == "take_over" or (is_torn and kind == "answer"):
                old = writer
                results, writer = begin_generation(folder)
                is_torn = False
                with pytest.raises(Superseded):
                    old.append(0, b"{}", is_ok=True)
                old.close()
                assert set(results.answers) == set(expected)
            if kind == "answer" and value not in results.answers:
                assert isinstance(value, int)
                writer.append(value, payload(value, "run"), is_ok=value % 2 == 0)
                results.refresh()
                expected[value] = payload(value, "run")
            elif kind == "late" and writer.generation > 1:
                assert isinstance(value, int)
                append_past_the_check(folder, writer.generation - 1, value)
            elif kind == "torn":
                assert isinstance(value, bytes)
                with log_path(folder, writer.generation).open("ab") as log:
                    log.write(value)
                is_torn = True
            assert read(folder) == expected
            counts.refresh()
            assert counts.num_answered == len(expected)
        assert (counts.num_ok, counts.num_failed) == (results.num_ok, results.num_failed)
        assert results.num_ok == sum(number % 2 == 0 for number in expected)
        assert results.num_failed == len(expected) - results.num_ok
        writer.close()


@settings(max_examples=20, deadline=None)
@given(cut=st.integers(1, 200))
def test_a_write_that_was_cut_is_as_if_it_had_not_been(cut: int) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        _, writer = begin_generation(folder)
        writer.append(0, payload(0, "whole"), is_ok=True)
        whole = log_path(folder, 1).stat().st_size
        writer.append(1, payload(1, "cut"), is_ok=True)
        writer.close()
        size = log_path(folder, 1).stat().st_size
        with log_path(folder, 1).open("r+b") as log:
            log.truncate(max(whole, size - cut))
        assert read(folder) == {0: payload(0, "whole")}
        results, writer = begin_generation(folder)
        writer.append(1, payload(1, "again"), is_ok=True)
        writer.close()
        assert set(results.answers) == {0}
        assert read(folder) == {0: payload(0, "whole"), 1: payload(1, "again")}


def test_of_two_that_take_over_at_once_one_does(tmp_path: Path) -> None:
    _, first = begin_generation(tmp_path)
    first.append(3, b"{}", is_ok=True)
    # Both have read what there is; the link decides.
    log_path(tmp_path, 2).write_bytes(b"")
    with pytest.raises(OSError, match="header"):
        begin_generation(tmp_path)
    log_path(tmp_path, 2).unlink()
    results, second = begin_generation(tmp_path)
    with pytest.raises(Superseded):
        first.check()
    assert (sorted(generations(tmp_path)), set(results.answers)) == ([1, 2], {3})
    first.close()
    second.close()


def test_a_closed_log_takes_nothing(tmp_path: Path) -> None:
    _, writer = begin_generation(tmp_path)
    writer.close()
    writer.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        writer.append(0, b"{}", is_ok=True)
    assert read(tmp_path) == {}
