"""The loop of a rank other than 0: takes steps from rank 0, computes its part of them, tells the front that it lives.
In a spread group it gives and takes its parts of blocks as well.

It ends when the front or rank 0 goes. Between steps it speaks as often as the engine does, so that the front takes its
silence for the engine's: a rank that is stopped withdraws the replica, also while nothing is computed.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable

import torch

from services.worker.engine_messages import RankAlive
from services.worker.errors import RankLost
from services.worker.ipc import Link
from services.worker.messages import Message
from services.worker.model.runner import CpuRunner
from services.worker.model.step import Int32Array, StepInput
from services.worker.parallel.block_parts import as_bytes
from services.worker.parallel.group import Group
from services.worker.parallel.step_frames import ByteArray, GatherParts, ScatterParts
from services.worker.parallel.step_link import RankLink

ALIVE_EVERY_S = 0.1


class RankLoop:
    """`run` until a peer closes its link."""

    def __init__(
        self,
        runner: CpuRunner,
        group: Group,
        steps: RankLink,
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
                self._obey()
            self._tell_alive()

    def _obey(self) -> None:
        match self._steps.receive():
            case StepInput() as step:
                self._step(step)
            case GatherParts(slots=slots):
                self._steps.give_parts(as_bytes(self._runner.decoder.pool[self._checked(slots)]))
            case ScatterParts(slots=slots, parts=parts):
                self._put(self._checked(slots), parts)

    def _checked(self, slots: Int32Array) -> torch.Tensor:
        """For indexing. Raises RankLost."""
        num_blocks = self._runner.spec.num_blocks
        if slots.size and not 0 <= slots.min() <= slots.max() < num_blocks:
            raise RankLost(f"rank 0 speaks of slots beyond {num_blocks}")
        return torch.from_numpy(slots).long()

    def _put(self, slots: torch.Tensor, parts: ByteArray) -> None:
        pool = self._runner.decoder.pool
        part_bytes = pool[0].numel() * pool.element_size()
        if parts.nbytes != len(slots) * part_bytes:
            raise RankLost(f"rank 0 sends {parts.nbytes} bytes for {len(slots)} parts of {part_bytes}")
        pool[slots] = torch.from_numpy(parts).view(pool.dtype).view(len(slots), *pool.shape[1:])

    def _step(self, step: StepInput) -> None:
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
