"""A stream's second attempt, at another worker beside the first: asked for, prepared, and handed over.

The ask is work that goes on (`Ask.resumes`), outside the line: the request has its turn already. The second attempt is
held by its worker (`hold_s`) until it is resumed: when it takes over, or, where it draws the same as the first, as soon
as it is prepared, to draw beside that. Every attempt that was granted here is closed here, or handed over.
A handoff is a move that is planned from the beginning: the router has named both workers in one grant.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog
from kvmesh.v1.router_pb2 import OUTCOME_CANCELLED, OUTCOME_STALE, OUTCOME_WORKER_FAILED, Grant, Outcome
from kvmesh.v1.worker_pb2 import MOVE_REASON_DRAINING, MoveReason, Prepared, WorkerGenerateResponse

from services.gateway.beside import Beside
from services.gateway.errors import GatewayError, ModelUnavailable
from services.gateway.move import Move, News, Stage, Switch
from services.gateway.move_times import MoveTimes
from services.gateway.output_record import OutputDiverged
from services.gateway.placed_attempt import PlacedAttempt
from services.gateway.placing import Placing
from services.gateway.worker_link import AttemptEnded

# Longest preparation, and how often a worker that stays is worth a try.
HOLD_S = 30.0
_TRIES = 3
# A handoff that takes so many times as long as forecast comes to nothing.
_HOLD_SHARE = 4.0
# The target is ready: the source's next token is worth so long a wait, since the client has it and waits for less then.
_ALIGN_S = 0.25
_log = structlog.get_logger("gateway.move")


class Takeover(NamedTuple):
    """The attempt to go on with, what the first has said last, and what the second has said beyond the record."""

    target: PlacedAttempt
    switch: Switch
    brought: list[WorkerGenerateResponse]


@dataclass(slots=True, eq=False)
class SecondAttempt:
    """Owner of a stream's second attempt, one at a time. on_ready: called when it is to take over, with `take`.

    may_wait: whether the source's next token will be heard as soon as it comes. times: of the present or last try.
    """

    placing: Placing
    on_ready: Callable[[], None]
    may_wait: Callable[[], bool]
    times: MoveTimes = field(default_factory=lambda: MoveTimes(0.0))
    _move: Move = field(init=False)
    # Workers not to be asked for: the source, and targets that failed.
    _avoided: list[str] = field(default_factory=list)
    _target: PlacedAttempt | None = None
    _task: asyncio.Task[None] | None = None
    # The source stays, and would only rather have the place for others.
    _relieves: bool = False
    # The target has caught up, and waits for the moment.
    _is_ready: bool = False
    # While it draws.
    _beside: Beside | None = None
    # No target has drawn anything else than its source.
    _may_draw_beside: bool = True
    # When the target of a handoff was started; 0: it was not planned with the source.
    _handed_off_at_s: float = 0.0

    def __post_init__(self) -> None:
        self._move = Move(self.placing.output)

    def wanted(self, reason: MoveReason.ValueType, source_id: str) -> None:
        """The worker of the stream's attempt would rather not go on with it; one that leaves asks for good."""
        is_leaving = reason == MOVE_REASON_DRAINING
        if self._move.stage is Stage.STAYING:
            self._avoided, self.times = [source_id], MoveTimes(time.monotonic())
            self._relieves = not is_leaving
        elif is_leaving:
            # Whatever else it wishes from now on.
            self._relieves = False
        self._move.wanted(time.monotonic(), math.inf if is_leaving else _TRIES)
        self.pulse(time.monotonic())

    def hand_off(self, source: PlacedAttempt) -> None:
        """Start the second part of a request whose source is only to compute the prompt, as its grant says.

        It pulls what the source computes, while that goes on as any other: should the target fail, to its end.
        """
        second, placing = source.grant.handoff, self.placing
        grant = Grant(
            worker_id=second.worker_id,
            worker_epoch=second.worker_epoch,
            worker_address=second.worker_address,
            pull_plan=second.pull_plan,
            local_blocks=second.local_blocks,
        )
        known, hold_s = self._move.planned(_TRIES), max(HOLD_S, _HOLD_SHARE * second.predicted_s)
        self._avoided, self._handed_off_at_s = [source.worker_id], time.monotonic()
        started_s = self._handed_off_at_s
        self.times = MoveTimes(started_s, asked_at_s=started_s, granted_at_s=started_s)
        self._target = PlacedAttempt.start(
            placing.placement, placing.job, second.attempt, grant, source.asked_at_s, known, hold_s
        )
        self._count_handoff("started")
        self._task = asyncio.create_task(self._prepare())

    def pulse(self, now_s: float) -> None:
        """Ask when it is time to; look for the target's silence, and the source's. now_s: monotonic time."""
        if self._move.is_due(now_s):
            self._move.asked()
            self.times = MoveTimes(self.times.wanted_at_s, asked_at_s=now_s)
            self._task = asyncio.create_task(self._prepare())
        if self._target is not None:
            self._target.pulse(now_s, self.placing.placement.admit_patience_s)
        if self._is_ready and now_s - self.times.caught_up_at_s > _ALIGN_S:
            self.on_ready()

    def heard_source(self, choice: int) -> None:
        """The source has just produced a token, which the client has: no moment is better to leave it."""
        if self._is_ready:
            self.on_ready()
        elif self._beside is not None and self._target is not None:
            try:
                self._beside.heard_source(choice, time.monotonic())
            except OutputDiverged:
                self._stop_reading()
                self._drop_diverged()
                return
            if further := self._move.told():
                self._target.inbox.resume(further)

    def has_diverged(self, target_id: str) -> None:
        """A target that was gone over to draws other tokens than were drawn before."""
        self._may_draw_beside = False
        self._count("diverged")
        _log.info("move_failed", target_id=target_id, reason="diverged", phase="switched")

    @property
    def is_preparing(self) -> bool:
        """Whether there is a second attempt."""
        return self._move.stage is Stage.PREPARING

    def take(self, unread: Iterable[WorkerGenerateResponse], news: News, *, is_move: bool) -> Takeover | None:
        """The second attempt, now the caller's to resume and to end; None when the source has said all already.

        unread, news: as in Move.switch. is_move: the source is well.
        """
        switch, target = self._move.switch(unread, news), self._target
        if switch is None or target is None:
            self.close()
            return None
        brought = self._beside.brought if self._beside is not None else []
        self._target, self._is_ready, self._beside = None, False, None
        # The target's messages are for another reader now.
        self._stop_reading()
        self.times.switched_at_s = time.monotonic()
        if self._handed_off_at_s:
            if is_move:
                self.placing.placement.metrics.moves.record_handoff(time.monotonic() - self._handed_off_at_s)
            self._count_handoff("completed" if is_move else "source_failed")
            self._handed_off_at_s = 0.0
        else:
            self._count("moved")
        return Takeover(target, switch, brought)

    def close(self) -> None:
        """Give up what is on its way. Idempotent."""
        self._move.end()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        if self._target is not None and self._handed_off_at_s:
            self._count_handoff("abandoned")
        self._handed_off_at_s = 0.0
        self._drop(OUTCOME_CANCELLED)

    async def _prepare(self) -> None:
        try:
            if self._target is None:
                await self._begin()
            await self._await_prepared()
        except GatewayError as error:
            if isinstance(error, ModelUnavailable):
                # None but those: they may have recovered.
                del self._avoided[1:]
            self._count("refused")
            _log.info("move_refused", source_id=self._avoided[0], error=type(error).__name__, **self.times.seconds())
            self._move.failed(time.monotonic())
        except AttemptEnded as end:
            self._fail(end.code.name.lower())
        except Exception:
            _log.exception("move_failed")
            self._fail("internal")

    async def _begin(self) -> None:
        """Raises GatewayError when nobody can be the target now."""
        placing, job = self.placing, self.placing.job
        number, asked_at_s = placing.next_number(), time.monotonic()
        ask = job.ask_again(number, [*placing.setbacks.excluded, *self._avoided], job.request_class, placing.output)
        ask.needs_room_now = self._relieves
        grant = await placing.granted(ask)
        self.times.granted_at_s = time.monotonic()
        known = self._move.started()
        self._target = PlacedAttempt.start(placing.placement, job, number, grant, asked_at_s, known, HOLD_S)

    async def _await_prepared(self) -> None:
        """Raises AttemptEnded when the target comes to nothing."""
        target = self._target
        while target is not None and target is self._target:
            message = await target.inbox.read()
            target.heard_at_s = time.monotonic()
            target.charge(message)
            kind = message.WhichOneof("event")
            if kind == "admitted":
                target.is_admitted, target.cached_tokens = True, message.admitted.cached_tokens
                self.times.admitted_at_s = target.heard_at_s
            elif kind == "prepared":
                self._on_prepared(target, message.prepared)
            elif kind == "stale":
                self._fail("stale", OUTCOME_STALE)
                return
            elif kind == "move_wanted":
                # It goes, too: whoever took the output there would have to leave again.
                self._fail("leaves", OUTCOME_CANCELLED)
                return
            elif self._beside is not None and kind != "prompt_advanced":
                self._on_drawn(self._beside, message)
                if kind == "completed":
                    # So the source has said all, too, and is about to say so.
                    return

    def _on_prepared(self, target: PlacedAttempt, told: Prepared) -> None:
        self.times.prepared(told, target.heard_at_s)
        output = self.placing.output
        if told.draws_beside and self._may_draw_beside and output.num_tokens:
            self._beside, target.draws_beside = Beside(output, target.heard_at_s), True
            target.inbox.resume(self._move.told())
            return
        further = self._move.prepared() if told.takes_more else []
        if further:
            target.inbox.resume(further, hold=True)
        else:
            self._ready()

    def _on_drawn(self, beside: Beside, message: WorkerGenerateResponse) -> None:
        try:
            is_time = beside.heard_target(message, time.monotonic())
        except OutputDiverged:
            self._drop_diverged()
            return
        if is_time:
            self.on_ready()

    def _drop_diverged(self) -> None:
        """The next target is to wait for its source's end."""
        self._may_draw_beside = False
        self._fail("diverged", OUTCOME_CANCELLED)

    def _stop_reading(self) -> None:
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def _ready(self) -> None:
        """The target waits for its last word: until the source's next token, where that will be heard at once."""
        self._is_ready = True
        if not self.placing.output.num_tokens or not self.may_wait():
            self.on_ready()

    def _fail(self, reason: str, outcome: Outcome.ValueType = OUTCOME_WORKER_FAILED) -> None:
        """The source goes on as if nothing had been."""
        if self._target is not None:
            _log.info(
                "move_failed",
                target_id=self._target.worker_id,
                reason=reason,
                phase=self.times.phase,
                **self.times.seconds(),
            )
            self._avoided.append(self._target.worker_id)
        if self._handed_off_at_s:
            self._count_handoff("target_failed")
        else:
            self._count("diverged" if reason == "diverged" else "target_failed")
        self._drop(outcome)
        self._handed_off_at_s = 0.0
        self._move.failed(time.monotonic())

    def _drop(self, outcome: Outcome.ValueType) -> None:
        target, self._target, self._is_ready, self._beside = self._target, None, False, None
        if target is not None:
            target.end(outcome)

    def _count_handoff(self, outcome: str) -> None:
        phase = "decode" if self.placing.output.num_tokens else "prefill"
        self.placing.placement.metrics.moves.count_handoff(outcome, phase)

    def _count(self, outcome: str) -> None:
        self.placing.placement.metrics.moves.count_move(outcome)
