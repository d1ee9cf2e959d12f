"""The engine's loop over a core, a runner and the links to front and mover: receive, schedule, run, send, commit.

What a step has brought is sent while the next one computes: between two steps stands only what the next one needs, its
tokens above all. Messages are taken in between steps alone, since an abort gives back slots. Steps keep the loop below
250 ms; when there is nothing to compute it waits for a message or for the time of the next load. A message that cannot
be handled fails its own request, a step that cannot be run fails the requests in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import structlog

from services.worker.block_transfers import BlockTransfers, SharedTransfers
from services.worker.chunk import Chunk
from services.worker.core import EngineCore
from services.worker.drawing import read_rows
from services.worker.draws import DrawRow, Draws, ReadRow
from services.worker.engine.batch import StepBuilder
from services.worker.engine_messages import EngineLoad
from services.worker.errors import RankLost
from services.worker.ipc import Link, wait_links
from services.worker.messages import Abort, Message, Resume, Submit
from services.worker.model.step import StepInput

LOAD_EVERY_S = 0.1
# While there are no requests: often enough for the silence of a second to mean something.
IDLE_LOAD_EVERY_S = 0.2
# While copies of blocks are under way, grammars are compiled or adapters loaded, of whose end nothing tells the loop.
_LOOK_EVERY_S = 0.001
# A runner that fails this often in a row is not coming back; the replica restarts.
MAX_FAILED_STEPS = 5

_log = structlog.get_logger()


class StepRunner(Protocol):
    """Executes steps and draws their tokens. At most one step is in flight."""

    def submit(self, step: StepInput) -> None:
        """Start a step. Raises ValueError when its arrays disagree."""

    def draw(self, rows: Sequence[DrawRow], reads: Sequence[ReadRow] = ()) -> Draws:
        """Wait for the step; draw a token for each of its first logit_rows, of which `rows` says how, and give what
        `reads` wants of the rest.
        """


class EngineLoop:
    """Runs until a link closes."""

    def __init__(
        self,
        core: EngineCore,
        runner: StepRunner,
        front: Link[Message],
        mover: Link[Message],
        *,
        transfers: BlockTransfers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._runner = runner
        self._front = front
        self._mover = mover
        self._transfers = transfers or SharedTransfers()
        self._short_blocks = 0
        self._clock = clock
        self._builder = StepBuilder()
        self._next_load_s = 0.0
        # No step begins before, while others leave a drain.
        self._next_step_s = 0.0
        self._failed_steps = 0

    def run(self) -> None:
        """Serve for ever.

        Raises ConnectionError when front or mover is gone, RankLost when a rank is, RuntimeError when steps keep
        failing.
        """
        while True:
            progressed = self.turn()
            if not progressed:
                now = self._clock()
                rests = self._next_step_s > now
                wait_s = (min(self._next_load_s, self._next_step_s) if rests else self._next_load_s) - now
                if self._core.is_preparing or not self._transfers.is_settled:
                    wait_s = min(wait_s, _LOOK_EVERY_S)
                wait_links([self._front, self._mover], max(0.0, wait_s))

    def turn(self) -> bool:
        """One round without waiting; whether a step was run."""
        for message in self._front.receive():
            self._handle(message)
        for message in self._mover.receive():
            self._transfers.receive(message, self._clock())
        self._transfers.poll(self._clock())
        self._exchange()
        now = self._clock()
        self._core.take_grammars()
        self._core.take_adapters(now)
        self._core.expire(now)
        chunks = self._core.schedule(now) if now >= self._next_step_s else []
        if chunks:
            self._next_step_s = now + self._core.drain_pace.least_step_s(now)
        started = bool(chunks) and self._start(chunks)
        # The tokens of the last step and admissions; neither waits for the step that has just started.
        self._send()
        if started:
            self._finish(chunks, now)
        return bool(chunks)

    def _exchange(self) -> None:
        """What core and mover say to each other, by way of the transfers, which may answer themselves."""
        core, transfers = self._core, self._transfers
        while core.to_mover or transfers.to_core:
            sent, core.to_mover = core.to_mover, []
            for message in sent:
                transfers.send(message, self._clock())
            told, transfers.to_core = transfers.to_core, []
            for message in told:
                self._handle(message)

    def _handle(self, message: Message) -> None:
        try:
            self._core.handle(message, self._clock())
        except Exception:
            _log.exception("a message could not be handled", type=type(message).__name__)
            if isinstance(message, Submit | Resume | Abort):
                self._core.fail_request(message.key, "INTERNAL", "the engine could not take the request in")

    def _start(self, chunks: list[Chunk]) -> bool:
        """Hand a step to the runner; False when it cannot be run."""
        try:
            self._runner.submit(self._builder.build(chunks))
        except RankLost:
            # Its requests are not at fault: they go on elsewhere, as those of any worker that dies.
            raise
        except Exception as error:
            self._fail(chunks, error)
            return False
        return True

    def _finish(self, chunks: list[Chunk], started_s: float) -> None:
        """Wait for the step in flight, draw and commit."""
        try:
            draws = self._runner.draw(self._core.draw_rows(chunks), read_rows(chunks))
        except RankLost:
            raise
        except Exception as error:
            self._fail(chunks, error)
            return
        self._failed_steps = 0
        now = self._clock()
        self._core.commit(chunks, draws, now - started_s, now)

    def _fail(self, chunks: list[Chunk], error: Exception) -> None:
        """End the requests of a step that could not be run. Raises RuntimeError when that keeps happening."""
        self._failed_steps += 1
        _log.error("a step failed", sequences=len(chunks), in_a_row=self._failed_steps, exc_info=error)
        self._core.fail_step(chunks, "the step of this request failed")
        if self._failed_steps >= MAX_FAILED_STEPS:
            self._send()
            raise RuntimeError(f"{self._failed_steps} steps in a row failed: {error}") from error

    def _send(self) -> None:
        self._exchange()
        core, now = self._core, self._clock()
        if core.load_changed or now >= self._next_load_s:
            core.load_changed = False
            self._next_load_s = now + (LOAD_EVERY_S if core.scheduler.requests else IDLE_LOAD_EVERY_S)
            core.to_front.append(self._load(now))
        for link, messages in ((self._front, core.to_front), (self._mover, self._transfers.to_mover)):
            link.send_all(messages)
            messages.clear()

    def _load(self, now: float) -> EngineLoad:
        """The core's load, and what transfers found no room."""
        waits, short_blocks = dict(self._transfers.waits), dict(self._transfers.short_blocks)
        if sum(short_blocks.values()) > self._short_blocks:
            self._short_blocks = sum(short_blocks.values())
            _log.warning("staging is too small for the transfers", waits=waits, short_blocks=short_blocks)
        return msgspec.structs.replace(self._core.load(now), staging_waits=waits, staging_short_blocks=short_blocks)
