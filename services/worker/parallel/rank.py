"""The loop of a rank other than 0: takes steps from rank 0, computes its part of them, tells the front that it lives.

It ends when the front or rank 0 goes. Between steps it speaks as often as the engine does, so that the front takes its
silence for the engine's: a rank that is stopped withdraws the replica, also while nothing is computed.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable

from services.worker.engine_messages import RankAlive
from services.worker.ipc import Link
from services.worker.messages import Message
from services.worker.model.runner import CpuRunner
from services.worker.parallel.group import Group
from services.worker.parallel.step_link import StepLink

ALIVE_EVERY_S = 0.1


class RankLoop:
    """`run` until a peer closes its link."""

    def __init__(
        self,
        runner: CpuRunner,
        group: Group,
        steps: StepLink,
        front: Link[Message],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._group = group
        self._steps = steps
        self._front = front
        self._clock = clock
        self._next_alive_s = 0.0

    def run(self) -> None:
        """Raises RankLost, or ConnectionError when the front is gone."""
        poll = select.poll()
        poll.register(self._steps.socket, select.POLLIN)
        poll.register(self._front.socket, select.POLLIN)
        while True:
            wait_s = max(0.0, self._next_alive_s - self._clock())
            ready = {descriptor for descriptor, _ in poll.poll(wait_s * 1000)}
            if self._front.socket.fileno() in ready:
                self._front.receive()
            if self._steps.socket.fileno() in ready:
                self._step()
            self._tell_alive()

    def _step(self) -> None:
        step = self._steps.receive()
        self._runner.submit(step)
        logits = self._runner.collect()
        if self._group.is_last and len(logits):
            self._group.send_logits(logits)
        self._steps.tell_done()

    def _tell_alive(self) -> None:
        now = self._clock()
        if now >= self._next_alive_s:
            self._next_alive_s = now + ALIVE_EVERY_S
            self._front.send(RankAlive())
