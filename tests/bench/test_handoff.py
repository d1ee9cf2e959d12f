"""The table of decisions that `bench.handoff` prints and draws."""

from __future__ import annotations

from bench.handoff_choice import CPU, choices, plot

STREAMS, LENGTHS = (0, 1, 8), (64, 512, 4096)


def pairs(link_bytes_per_s: float) -> set[tuple[int, int]]:
    found = choices(CPU, STREAMS, LENGTHS, link_bytes_per_s=link_bytes_per_s)
    assert [(one.streams, one.prompt_tokens) for one in found] == [(s, n) for s in STREAMS for n in LENGTHS]
    return {(one.streams, one.prompt_tokens) for one in found if one.is_pair}


def test_long_prompts_and_running_streams_speak_for_two_workers() -> None:
    fast, slow = pairs(1e9), pairs(1e6)
    assert (8, 4096) in fast
    assert not any(streams == 0 for streams, _ in fast)
    assert slow < fast


def test_every_decision_is_a_cell_of_the_plot() -> None:
    found = choices(CPU, STREAMS, LENGTHS, link_bytes_per_s=1e9)
    svg = plot({"a": found, "b": found})
    assert svg.count("<rect") == 1 + 2 * len(found)
    assert svg.count("#1f4e79") == 2 * sum(one.is_pair for one in found)
