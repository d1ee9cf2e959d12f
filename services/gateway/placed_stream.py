"""One prompt on its way through the mesh: an attempt at a worker, and another elsewhere until it is answered.

`read` gives the worker's messages from Admitted to Completed, each once, whoever produced them. A worker that fails is
excluded and another is asked for, which begins with what the record holds of the output: the client sees nothing of it
before the first token, and a pause after it. While a worker says nothing at all before it has admitted the prompt, the
router is asked again, which by then knows whether it is suspect; patience doubles. All this is bounded by failures in a
row, the tenant's budget of retries, `rescue_wait_s` and the deadline.
Every granted attempt is closed by one Done. `close` is idempotent and releases everything.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from dataclasses import dataclass, field

import grpc
import structlog
from kvmesh.v1.common_pb2 import CachedTokens, Usage
from kvmesh.v1.router_pb2 import OUTCOME_CANCELLED, OUTCOME_OK, OUTCOME_STALE, OUTCOME_WORKER_FAILED, Outcome
from kvmesh.v1.worker_pb2 import Admitted, Completed, WorkerGenerateResponse

from services.gateway.errors import AnswerNotKept, DeadlineExceeded, GatewayError, InvalidRequest, WorkerFailed
from services.gateway.idempotency_records import Place
from services.gateway.interruption import Pauses
from services.gateway.output_record import OutputDiverged, OutputRecord
from services.gateway.placed_attempt import PlacedAttempt
from services.gateway.placement import Placement
from services.gateway.placement_job import PlacementJob
from services.gateway.placing import Placing
from services.gateway.second_attempt import SecondAttempt
from services.gateway.told_usage import ToldUsage
from services.gateway.worker_link import AttemptEnded, LinkSilent

_log = structlog.get_logger("gateway.placement")


@dataclass(slots=True, eq=False)
class PlacedStream:
    """State of one prompt. _ready: messages that are in the record and wait for the reader."""

    placement: Placement
    job: PlacementJob
    worker_id: str = ""
    _output: OutputRecord = field(init=False)
    _placing: Placing = field(init=False)
    _second: SecondAttempt = field(init=False)
    _pauses: Pauses = field(init=False)
    _open: PlacedAttempt | None = None
    _ready: deque[WorkerGenerateResponse] = field(default_factory=deque)
    _told: ToldUsage = field(default_factory=ToldUsage)
    # Its wish to leave before all of the prompt was told, which a second attempt would not tell.
    _put_off: WorkerGenerateResponse | None = None
    _closed: bool = False

    def __post_init__(self) -> None:
        self._output = OutputRecord(self.job.num_choices, self.job.prompt.max_tokens, self.job.stop_token_ids)
        self._placing = Placing(self.placement, self.job, self._output)
        self._second = SecondAttempt(self._placing, self._on_ready, self._is_awaited)
        self._pauses = Pauses(self.placement.metrics)

    @property
    def is_taken(self) -> bool:
        """Whether a worker has admitted the prompt."""
        return self._told.first_attempt > 0

    @property
    def route_s(self) -> float:
        """Seconds spent waiting for placements."""
        return self._placing.route_s

    async def read(self) -> WorkerGenerateResponse:
        """The next Admitted, tokens, finish or Completed. Raises GatewayError; nothing is to be read after either."""
        while True:
            if self._ready:
                return self._ready.popleft()
            attempt = self._open
            if attempt is None:
                self._opened(await self._placing.start())
                continue
            try:
                message = await attempt.inbox.read()
            except AttemptEnded as end:
                if attempt is self._open:
                    self._on_end(attempt, end)
                continue
            news = self._news(attempt, message)
            if news is not None and self._take(attempt, news):
                return news

    async def attach(self, request_id: str, place: Place) -> None:
        """Read from its beginning what a worker keeps of the request `request_id`; what it loses, others go on with.

        Raises AnswerNotKept when it is not there.
        """
        attempt = PlacedAttempt.attach(self.placement, self.job, request_id, place)
        self._opened(attempt)
        try:
            message = await attempt.inbox.read()
        except AttemptEnded as end:
            self._end_attempt(OUTCOME_CANCELLED)
            raise AnswerNotKept(f"the answer is not kept: {end.code.name}") from None
        if not message.HasField("admitted"):
            # Another attempt has taken its place meanwhile, and there is no room for that.
            self._end_attempt(OUTCOME_CANCELLED)
            raise AnswerNotKept("the answer is not kept: STALE")
        self._take(attempt, message)
        self._ready.append(message)

    def end_choice(self, choice: int) -> None:
        """The client has all it wants of a choice (stop strings)."""
        self._output.end(choice)

    def finish(self) -> None:
        """The same of all; the worker's rest is not needed."""
        self._close(OUTCOME_OK)

    def close(self) -> None:
        """Release everything now: cancels the worker's call and tells the router."""
        self._close(OUTCOME_CANCELLED)

    def pulse(self, now_s: float) -> None:
        """Look for silence. now_s: monotonic time."""
        if self._open is not None:
            self._open.pulse(now_s, self.placement.admit_patience_s * 2**self._placing.setbacks.silences)
            self._second.pulse(now_s)

    def _opened(self, attempt: PlacedAttempt | None) -> None:
        if attempt is not None:
            self._open, self.worker_id = attempt, attempt.worker_id
            self.placement.pulse.add(self)
            if attempt.grant.HasField("handoff"):
                self._second.hand_off(attempt)

    def _news(self, attempt: PlacedAttempt, message: WorkerGenerateResponse) -> WorkerGenerateResponse | None:
        """What of a message is not known already; None: nothing, as of all that follows a divergence."""
        if not attempt.draws_beside:
            return message
        if attempt.has_diverged:
            return None
        try:
            return self._output.news(message)
        except OutputDiverged:
            attempt.has_diverged = True
            self._second.has_diverged(attempt.worker_id)
            attempt.inbox.break_off(AttemptEnded(grpc.StatusCode.ABORTED, "it draws other tokens than were drawn"))
            return None

    def _take(self, attempt: PlacedAttempt, message: WorkerGenerateResponse) -> bool:
        """Note what the worker says; whether the reader is to have it."""
        attempt.heard_at_s = time.monotonic()
        attempt.charge(message)
        kind = message.WhichOneof("event")
        if kind == "tokens":
            if not attempt.first_token_at_s:
                self._on_first_token(attempt)
            attempt.heard_tokens(len(message.tokens.token_ids))
            self._pauses.last_token_at_s = attempt.heard_at_s
            is_news = self._output.note(message)
            self._second.heard_source(message.tokens.choice)
            if self._put_off is not None and attempt is self._open:
                self._second.wanted(self._put_off.move_wanted.reason, attempt.worker_id)
            self._put_off = None
            return is_news
        if kind == "finish":
            return self._output.note(message)
        if kind == "admitted":
            return self._on_admitted(attempt, message.admitted.cached_tokens)
        if kind == "completed":
            self._on_completed(attempt, message.completed.usage)
            return True
        if kind == "stale":
            self._on_stale()
        elif kind == "move_wanted":
            self._on_move_wanted(attempt, message)
        elif kind == "embedding":
            self._output.end(0)
        return kind in ("prompt_logprobs", "embedding")

    def _on_move_wanted(self, attempt: PlacedAttempt, message: WorkerGenerateResponse) -> None:
        if self.job.reads_prompt and not self._output.num_tokens:
            self._put_off = message
        else:
            self._second.wanted(message.move_wanted.reason, attempt.worker_id)

    def _on_admitted(self, attempt: PlacedAttempt, cached_tokens: int) -> bool:
        attempt.is_admitted = True
        self._tell_keeper(attempt)
        self._placing.is_accepted = True
        return self._told.admitted(attempt.number, cached_tokens)

    def _tell_keeper(self, attempt: PlacedAttempt) -> None:
        if self.job.keeper is not None:
            self.job.keeper.placed(attempt.grant, attempt.number, is_resumed=self._output.num_tokens > 0)

    def _on_first_token(self, attempt: PlacedAttempt) -> None:
        self._placing.setbacks.progressed()
        self._pauses.over(self.worker_id, attempt.number, attempt.heard_at_s)

    def _on_completed(self, attempt: PlacedAttempt, usage: Usage) -> None:
        self._end_attempt(OUTCOME_OK, self._told.complete(attempt.number, usage), is_last=True)
        self._close(OUTCOME_OK)

    def _on_end(self, attempt: PlacedAttempt, end: AttemptEnded) -> None:
        """The attempt is over without Completed. Returns when another may be tried, raises when not."""
        if attempt.is_stalled or isinstance(end, LinkSilent):
            self._on_silence(attempt)
        elif end.code == grpc.StatusCode.DEADLINE_EXCEEDED:
            self._raise(DeadlineExceeded("the deadline passed before the answer was complete"))
        elif end.code == grpc.StatusCode.INVALID_ARGUMENT:
            self._raise(InvalidRequest(end.detail))
        elif end.code == grpc.StatusCode.RESOURCE_EXHAUSTED and not attempt.first_token_at_s:
            self._on_stale()
        elif end.code == grpc.StatusCode.UNIMPLEMENTED:
            self._on_too_old()
        elif end.code == grpc.StatusCode.FAILED_PRECONDITION and self.job.adapter and not self._second.is_preparing:
            self._on_no_adapter(attempt)
        elif end.code == grpc.StatusCode.RESOURCE_EXHAUSTED:
            self._raise(WorkerFailed("the answer was read too slowly"))
        else:
            self._fail(attempt, "ended_early" if end.code == grpc.StatusCode.OK else end.code.name.lower())

    def _on_stale(self) -> None:
        self.placement.metrics.count_retry("stale")
        self._end_attempt(OUTCOME_STALE)
        self._placing.again()

    def _on_too_old(self) -> None:
        """The worker's release does not know what the prompt needs, nor has the router's known that it does not."""
        self.placement.metrics.count_retry("too_old")
        _log.info("worker_too_old", worker_id=self.worker_id)
        self._placing.setbacks.excluded.append(self.worker_id)
        self._end_attempt(OUTCOME_CANCELLED)
        self._placing.again()

    def _on_no_adapter(self, attempt: PlacedAttempt) -> None:
        """The worker cannot load the adapter: no failure of the worker, nor a retry that the tenant is to lack then."""
        setbacks = self._placing.setbacks
        setbacks.failed(attempt.worker_id)
        self.placement.metrics.count_retry("no_adapter")
        _log.warning("adapter_not_loaded", worker_id=self.worker_id, attempt=attempt.number)
        self._end_attempt(OUTCOME_CANCELLED)
        if setbacks.failures >= self.placement.max_attempts:
            raise WorkerFailed(f"{setbacks.failures} workers in a row could not load the adapter")
        self._placing.again()

    def _on_silence(self, attempt: PlacedAttempt) -> None:
        """A worker that has not admitted the request may only be slow: it is not excluded before the last patience."""
        waited_s = time.monotonic() - self._placing.setbacks.granted_at_s
        if attempt.is_admitted or waited_s > self.placement.admit_timeout_s:
            self._fail(attempt, "silent")
            return
        self._placing.setbacks.silences += 1
        self.placement.metrics.count_retry("silent")
        _log.warning("worker_silent", worker_id=self.worker_id, attempt=attempt.number, waited_s=round(waited_s, 3))
        self._end_attempt(OUTCOME_CANCELLED)
        self._placing.retry()

    def _is_awaited(self) -> bool:
        return self._open is not None and self._open.inbox.is_awaited

    def _on_ready(self) -> None:
        """Another worker is to take over from the one that would rather not go on."""
        if self._open is not None:
            self._hand_over(self._open, "wanted", is_move=True)

    def _hand_over(self, source: PlacedAttempt, reason: str, *, is_move: bool) -> None:
        """What the source has said is taken; the target is told of it, and goes on after what it has said itself."""
        unread, known_tokens = list(source.inbox.unread), self._output.num_tokens
        for message in unread:
            source.charge(message)
        taken = self._second.take(unread, functools.partial(self._news, source), is_move=is_move)
        if taken is None:
            return
        target, switch, brought = taken
        if self._output.num_tokens > known_tokens:
            source.heard_at_s = time.monotonic()
            source.heard_tokens(self._output.num_tokens - known_tokens)
        self._tell_admitted(source, target, unread)
        self._ready.extend(switch.ready)
        source.inbox.hand_over()
        self._end_attempt(OUTCOME_CANCELLED if is_move else OUTCOME_WORKER_FAILED)
        if self._output.is_over:
            target.end(OUTCOME_CANCELLED)
            self._complete()
            return
        if switch.ready:
            self._pauses.last_token_at_s = time.monotonic()
        self._pauses.begin(reason, source.worker_id, self._output.num_tokens, is_move=is_move, times=self._second.times)
        target.inbox.resume(switch.further)
        self._opened(target)
        if target.is_admitted:
            self._tell_keeper(target)
        for message in brought:
            news = self._news(target, message)
            if news is not None and self._take(target, news):
                self._ready.append(news)

    def _tell_admitted(
        self, source: PlacedAttempt, target: PlacedAttempt, unread: list[WorkerGenerateResponse]
    ) -> None:
        """Before the output; of a handoff to a worker that is prepared before the reader has had that of its source."""
        if self._told.first_attempt:
            return
        for message in unread:
            if message.HasField("admitted"):
                self._on_admitted(source, message.admitted.cached_tokens)
                self._ready.append(message)
        if target.is_admitted and not self._told.first_attempt:
            self._on_admitted(target, target.cached_tokens)
            admitted = Admitted(worker_id=target.worker_id, cached_tokens=target.cached_tokens)
            self._ready.append(WorkerGenerateResponse(admitted=admitted))

    def _fail(self, attempt: PlacedAttempt, reason: str) -> None:
        """Leave a broken attempt; raises when no other may be tried."""
        setbacks = self._placing.setbacks
        setbacks.failed(attempt.worker_id)
        self.placement.metrics.count_retry("worker_failed")
        _log.warning("worker_failed", worker_id=self.worker_id, attempt=attempt.number, reason=reason,
                     output_tokens=self._output.num_tokens)  # fmt: skip
        if self._second.is_preparing:
            self._hand_over(attempt, reason, is_move=False)
            return
        self._end_attempt(OUTCOME_WORKER_FAILED)
        self._ready.extend(self._output.loose_ends())
        if self._output.is_over:
            self._complete()
            return
        if setbacks.failures >= self.placement.max_attempts:
            raise WorkerFailed(f"{setbacks.failures} workers in a row failed to answer")
        self._pauses.begin(reason, attempt.worker_id, self._output.num_tokens, is_move=False)
        self._placing.retry()

    def _complete(self) -> None:
        """The attempt was lost when it had told all but its end."""
        usage = self._told.without_an_end(self.job.prompt.num_tokens, self._output.num_tokens)
        self._ready.append(WorkerGenerateResponse(completed=Completed(usage=usage)))
        self._close(OUTCOME_OK)

    def _raise(self, error: GatewayError) -> None:
        self._end_attempt(OUTCOME_WORKER_FAILED if isinstance(error, WorkerFailed) else OUTCOME_CANCELLED)
        raise error

    def _close(self, outcome: Outcome.ValueType) -> None:
        if not self._closed:
            self._closed = True
            self._end_attempt(outcome, is_last=True)
        self._pauses.abandon()
        self._placing.leave(self._told.cached_tokens)

    def _end_attempt(
        self, outcome: Outcome.ValueType, cached: CachedTokens | None = None, *, is_last: bool = False
    ) -> None:
        attempt, self._open, self._put_off = self._open, None, None
        if attempt is not None:
            self.placement.pulse.discard(self)
            self._second.close()
            attempt.end(outcome, cached, is_last=is_last)
