"""When a kvstore node is left alone, and when it is reported."""

from __future__ import annotations

from services.worker.mover.node_health import FAILURES_UNTIL_LEFT, REST_S, NodeHealth
from services.worker.mover_messages import NodeFailing


def test_a_failure_rests_and_several_in_a_row_are_told() -> None:
    told: list[NodeFailing] = []
    health = NodeHealth(told.append)
    for number in range(1, FAILURES_UNTIL_LEFT + 1):
        assert not told
        health.failed("n", 1, number)
        assert health.rests("n", 1, number)
        assert health.rests("n", 1, number, after=2) == (number >= 2)
        assert not health.rests("n", 1, number + REST_S)
    assert told == [NodeFailing("n", 1)]
    health.failed("n", 1, 9.0)
    assert len(told) == 2, "told again, in case the first came too early"


def test_an_answer_forgives_and_another_start_is_another_node() -> None:
    told: list[NodeFailing] = []
    health = NodeHealth(told.append)
    for _ in range(10):
        health.failed("n", 1, 0.0)
        health.worked("n", 1)
    assert not told
    health.failed("n", 1, 0.0)
    assert not health.rests("n", 2, 0.0)
    for number in range(1000):
        health.failed(f"n{number}", 1, 0.0)
    assert len(health._nodes) <= 256
