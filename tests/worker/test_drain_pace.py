"""How fast a draining engine goes on."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from services.worker.drain_pace import DrainPace
from services.worker.draws import DrawRow, Draws, ReadRow
from services.worker.engine.loop import EngineLoop
from services.worker.engine.sampled import Sampled
from services.worker.engine_messages import DrainEngine, FromEngineToFront, FromFrontToEngine
from services.worker.ipc import Link
from services.worker.messages import Abort, Message
from services.worker.mover_messages import FromMoverToEngine
from tests.worker.cores import make_core, submit
from tests.worker.toy import ToyRunner


def test_it_keeps_its_pace_while_requests_leave() -> None:
    pace = DrainPace()
    assert pace.least_step_s(0.0) == 0.0, "no drain"
    pace.begin(0.04, 10.0)
    assert pace.least_step_s(10.9) == 0.04
    assert pace.least_step_s(11.1) == 0.0, "nobody leaves"
    pace.left(12.0)
    assert pace.least_step_s(12.5) == 0.04
    assert pace.least_step_s(13.1) == 0.0


class Clocked(Sampled):
    """An engine loop whose steps take `cost_s`, by a clock that the test turns."""

    def __init__(self, front: socket.socket, mover: socket.socket) -> None:
        super().__init__(ToyRunner(64))
        self.now, self.cost_s = 100.0, 0.010
        links: tuple[Link[Message], Link[Message]] = Link(front, FromFrontToEngine), Link(mover, FromMoverToEngine)
        self.core = make_core(64)
        self._loop = EngineLoop(self.core, self, *links, clock=lambda: self.now)

    def draw(self, rows: Sequence[DrawRow], reads: Sequence[ReadRow] = ()) -> Draws:
        self.now += self.cost_s
        return super().draw(rows, reads)

    def until(self, condition: Callable[[], object]) -> None:
        """Go on until what was sent has arrived, which may take real time."""
        deadline_s = time.monotonic() + 60.0
        while not condition():
            assert time.monotonic() < deadline_s
            self._loop.turn()

    def steps(self, seconds: float) -> int:
        """How many are begun, with a look each thousandth of a second while none is."""
        count, until_s = 0, self.now + seconds
        while self.now < until_s:
            if self._loop.turn():
                count += 1
            else:
                self.now += 0.001
        return count


@pytest.fixture
def ends() -> Iterator[tuple[Link[Message], Clocked]]:
    sockets = [socket.socketpair() for _ in range(2)]
    yield Link(sockets[0][0], FromEngineToFront), Clocked(sockets[0][1], sockets[1][1])
    for pair in sockets:
        for one in pair:
            one.close()


def test_the_loop_rests_between_steps(ends: tuple[Link[Message], Clocked]) -> None:
    front, engine = ends
    for key in (1, 2):
        front.send(submit(key, [1, 2, 3], 240))
    engine.until(lambda: len(engine.core.scheduler.requests) == 2)
    engine.steps(0.2)
    front.send(DrainEngine())
    engine.until(lambda: engine.core.drain_pace.least_step_s(engine.now))
    engine.cost_s = 0.002
    assert engine.steps(0.3) == pytest.approx(30, abs=4), "as before, though they take less"
    engine.steps(0.75)
    assert engine.steps(0.1) == pytest.approx(50, abs=2), "nobody has left for a second"
    front.send(Abort(1))
    engine.until(lambda: len(engine.core.scheduler.requests) == 1)
    assert engine.steps(0.1) == pytest.approx(10, abs=2)
