"""What `bench.drain` makes of streams and of a round."""

from __future__ import annotations

from dataclasses import replace

from bench.drain import Round
from bench.drain_streams import Stream, body_of

CLEAN = Round("status 0", 1.0, 2, [], 2, 2.0, 0.0, [60.0, 80.0], [50.0, 50.0], 30.0, 40.0, 32.0, 45.0, 70.0, [], {})


def test_the_gap_is_the_time_between_the_last_event_before_a_move_and_the_first_after() -> None:
    stream = Stream(times_s=[1.0, 1.1, 1.4, 1.5, 1.6])
    assert max(stream.gaps_s(1.15, 2.0)) == 1.4 - 1.1, "the signal falls into it"
    assert max(stream.gaps_s(1.05, 1.05)) == 1.1 - 1.0, "so does the worker's end"
    assert stream.gaps_s(1.7, 2.0) == []


def test_a_round_in_which_anything_is_lost_is_not_clean() -> None:
    assert CLEAN.is_clean
    spoilt = [{"exit": "SIGKILL"}, {"errors": ["x"]}, {"equal_texts": 1}, {"rescues": 1.0}, {"left": {"gauge": 1.0}}]
    assert not any(replace(CLEAN, **one).is_clean for one in spoilt)  # type: ignore[arg-type]


def test_no_two_prompts_share_a_beginning() -> None:
    prompts = [body_of(number, 64, 8)["prompt"] for number in range(16)]
    assert len({tuple(one[:16]) for one in prompts}) == 16
    assert prompts[3] == body_of(3, 64, 8)["prompt"], "the same in every run"
