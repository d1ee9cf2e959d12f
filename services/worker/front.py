"""The front's middle: carries requests to the engine and what the engine and the mover say to where it belongs.

Two pumps, one for each child, run until a child is gone. A dead child, or one silent for too long, ends the replica:
every open stream ends with UNAVAILABLE and `run` raises ChildDied.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from services.common.announcer import Announcer, Tier
from services.common.blocks import split_ids
from services.common.own_pauses import TICK_S
from services.worker.children import Part, kill
from services.worker.departures import Departures
from services.worker.engine_messages import BlockChanges, DrainEngine, EngineFailed, EngineLoad, PushTarget
from services.worker.errors import ChildDied, Refused
from services.worker.load_board import LoadBoard
from services.worker.messages import (
    Abort,
    AdmittedRequest,
    ChoiceOutput,
    KnownOutput,
    Message,
    MoveRequested,
    PreparedRequest,
    PromptAdvanced,
    PromptEmbedded,
    PromptScored,
    RequestAborted,
    RequestFailed,
    Resume,
    StaleRequest,
    StepOutput,
    Submit,
)
from services.worker.mover_messages import MoverCounters, NodeFailing
from services.worker.observation import WorkerMetrics, record_aborted_spans
from services.worker.push_target import NO_TARGET
from services.worker.streams import Event, RequestStream, StreamTable

_log = structlog.get_logger()


class Front:
    """One replica's requests, load and block changes, between gRPC, the engine and the mover."""

    def __init__(
        self,
        engine: Part,
        mover: Part,
        *,
        board: LoadBoard,
        streams: StreamTable,
        announcer: Announcer,
        metrics: WorkerMetrics,
        child_silence_s: float,
        departure_s: float,
        node_failing: Callable[[NodeFailing], None],
        ranks: Sequence[Part] = (),
        is_exact: bool = True,
    ) -> None:
        """departure_s: for which a reader that is asked to go on elsewhere keeps others from being asked. ranks: the
        other processes that compute, where the engine is one of several. is_exact: tokens do not depend on the batch.
        """
        self.is_exact = is_exact
        self.board = board
        self.streams = streams
        self.metrics = metrics
        self._engine = engine
        self._mover = mover
        self._ranks = ranks
        self._announcer = announcer
        self._child_silence_s = child_silence_s
        self._node_failing = node_failing
        self._departure_s = departure_s
        self._departures = Departures((), departure_s)
        self._departure_timer: asyncio.TimerHandle | None = None
        self._target: PushTarget = NO_TARGET

    async def run(self) -> None:
        """Serve until a child ends. Raises ChildDied, every open stream having been ended with an error."""
        now = time.monotonic()
        self.board.engine_heard(now)
        self.board.mover_heard(now)
        self.board.ranks_heard_s = {rank.role: now for rank in self._ranks}
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump_engine())
                group.create_task(self._pump_mover())
                group.create_task(self._check_silence())
                group.create_task(self._engine.watch())
                group.create_task(self._mover.watch())
                for rank in self._ranks:
                    group.create_task(self._pump_rank(rank))
                    group.create_task(rank.watch())
        except* (ChildDied, ConnectionError) as errors:
            detail = str(next((e for e in errors.exceptions if isinstance(e, ChildDied)), errors.exceptions[0]))
            self.board.ready = False
            self.streams.fail_all("UNAVAILABLE", "the worker has lost a part of itself")
            raise ChildDied(detail) from None

    def submit(self, name: str, make: Callable[[int], Submit], *, is_held: bool = False) -> RequestStream:
        """Open a stream and hand the request to the engine. Raises Refused while the replica takes nothing."""
        if self.board.draining or not self.board.ready:
            raise Refused("UNAVAILABLE", "the worker is draining" if self.board.draining else "the worker is not ready")
        if self.streams.is_full:
            raise Refused("RESOURCE_EXHAUSTED", "too many open requests")
        stream = self.streams.open(name, is_held=is_held)
        try:
            self._engine.link.send(make(stream.key))
        except BaseException:
            self.streams.close(stream.key)
            raise
        return stream

    def resume(self, stream: RequestStream, further: list[KnownOutput], *, hold: bool = False) -> None:
        """Let a held request draw on after `further`, or with `hold` compute that; nothing when it has ended."""
        if not stream.is_ended:
            stream.is_held &= hold
            self._engine.link.send(Resume(stream.key, further, hold))

    def release(self, stream: RequestStream) -> None:
        """The stream's reader has gone; what the engine still does for it is aborted. Idempotent."""
        if self.streams.close(stream.key) is None:
            return
        if not stream.is_ended:
            self._engine.link.send(Abort(stream.key))
            self.metrics.ended("cancelled")
        if stream.admitted:
            self.board.note_ended(stream.name)
        if self.board.draining:
            self._departures.gone(stream.key)
            self._see_off()

    def fail(self, stream: RequestStream, code: str, detail: str) -> None:
        """End an open request with an error of the front's own; nothing when it has ended already."""
        if stream.is_ended:
            return
        _log.warning("a request is given up", request_id=stream.name.rpartition("/")[0], code=code, detail=detail)
        self._engine.link.send(Abort(stream.key))
        stream.put(RequestFailed(stream.key, code, detail))

    def drain(self) -> None:
        """Take no more requests; open ones go on, and their readers are asked to move them, some at a time."""
        if self.board.draining:
            return
        self.board.set_draining()
        self._engine.link.send(DrainEngine())
        admitted = self.streams.admitted()
        self._departures = Departures((one.key for one in admitted if not one.is_held), self._departure_s)
        for stream in admitted:
            if stream.is_held:
                # It has just been moved here, and would be handed over any moment.
                self._deliver(MoveRequested(stream.key, "draining"))
        self._see_off()

    def set_push_target(self, target: PushTarget) -> None:
        """Tell engine and mover where blocks are pushed to from now on."""
        if target != self._target:
            self._target = target
            _log.info("push target", kvstore_id=target.location_id)
            self._mover.link.send(target)
            self._engine.link.send(target)

    async def _pump_engine(self) -> None:
        while True:
            messages = await self._engine.link.receive_all()
            self.board.engine_heard(time.monotonic())
            for message in messages:
                self._take_engine(message)

    async def _pump_mover(self) -> None:
        while True:
            message = await self._mover.link.receive()
            self.board.mover_heard(time.monotonic())
            if isinstance(message, MoverCounters):
                self.metrics.mover = message
            elif isinstance(message, NodeFailing):
                self._node_failing(message)

    async def _pump_rank(self, rank: Part) -> None:
        while True:
            await rank.link.receive_all()
            self.board.ranks_heard_s[rank.role] = time.monotonic()

    def _take_engine(self, message: Message) -> None:
        match message:
            case StepOutput(choices=choices, completed=completed):
                for output in choices:
                    self._deliver(output)
                for usage in completed:
                    self._deliver(usage)
            case EngineLoad():
                self.board.publish(message)
            case AdmittedRequest() | StaleRequest() | RequestFailed() | PreparedRequest() | MoveRequested():
                self._deliver(message)
            case PromptAdvanced() | PromptScored() | PromptEmbedded():
                self._deliver(message)
            case RequestAborted():
                self.metrics.served(message.usage)
                record_aborted_spans(message)
            case BlockChanges(adds=adds, removes=removes):
                self._announcer.remove(split_ids(removes))
                self._announcer.add(split_ids(adds), Tier.HBM)
            case EngineFailed(detail=detail):
                raise ChildDied(f"the engine gave up: {detail}")

    def _deliver(self, event: Event) -> None:
        """Hand an event to its stream; a reader that has gone misses it, one that is too slow is let go."""
        stream = self.streams.get(event.key)
        if stream is None:
            return
        if isinstance(event, AdmittedRequest):
            stream.admitted = True
            self.board.note_admitted(stream.name)
        elif isinstance(event, MoveRequested):
            self.metrics.move_wanted(event.reason)
        if not stream.put(event) and isinstance(event, ChoiceOutput | PromptScored):
            self.fail(stream, "RESOURCE_EXHAUSTED", "the stream is read too slowly")
        if isinstance(event, AdmittedRequest) and self.board.draining:
            # It was on its way to the engine when the drain began.
            if stream.is_held:
                self._deliver(MoveRequested(event.key, "draining"))
            else:
                self._departures.add(event.key)
                self._see_off()

    def _see_off(self) -> None:
        """Ask the next readers to go on elsewhere, and look again when one that was asked has not gone."""
        loop = asyncio.get_running_loop()
        for key in self._departures.due(loop.time()):
            self._deliver(MoveRequested(key, "draining"))
        if self._departure_timer is not None:
            self._departure_timer.cancel()
        next_s = self._departures.next_s()
        self._departure_timer = None if next_s is None else loop.call_at(next_s, self._see_off)

    async def _check_silence(self) -> None:
        """A child that is stopped keeps its socket open; only its silence shows."""
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self.board.tick(now)
            silences_s = self.board.silences_s(now)
            # The ranks first: while one is stopped in the midst of a step, the engine is silent as well.
            parts = (*self._ranks, self._engine, self._mover)
            for part, silence_s in zip(parts, silences_s, strict=True):
                if silence_s > self._child_silence_s:
                    kill(part)
                    raise ChildDied(f"the {part.role} has said nothing for {silence_s:.1f} s")
