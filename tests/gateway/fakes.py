"""A router and a worker at the other end of real gRPC connections, that answer as a test scripts them."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from kvmesh.v1 import router_pb2, worker_pb2
from kvmesh.v1.common_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    LOCATION_KIND_WORKER,
    CachedTokens,
    PositionLogprobs,
    PromptLogprobs,
    PullStep,
    TokenLogprob,
    Usage,
)
from kvmesh.v1.router_pb2 import (
    Ask,
    Done,
    Grant,
    Handoff,
    ModelAlias,
    ModelSnapshot,
    ModelTraffic,
    QueueReport,
    Refusal,
    RouteRequest,
    RouteResponse,
    ServedAdapter,
    ServedModel,
)
from kvmesh.v1.router_pb2_grpc import RouterServicer, add_RouterServicer_to_server
from kvmesh.v1.worker_pb2 import (
    MOVE_REASON_DRAINING,
    Admitted,
    AttemptEnd,
    AttemptEvents,
    Completed,
    Embedding,
    KnownOutput,
    MoveReason,
    MoveWanted,
    Prepared,
    PromptAdvanced,
    ResumeAttempt,
    ServeBatch,
    ServeRequest,
    Stale,
    StartAttempt,
    TokenChunk,
    WorkerChoiceFinish,
    WorkerGenerateRequest,
    WorkerGenerateResponse,
    WorkerLoad,
)
from kvmesh.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server

from services.common.release import PROTOCOL
from services.common.rpc import MeshServer
from services.common.security import MeshSecret

SECRET = MeshSecret("a secret for tests only")
DIGEST = b"m" * 16
HEARTBEAT_S = 0.1


def served_model(**changes: Any) -> ServedModel:
    """The default model as a router reports it."""
    fields: dict[str, Any] = {
        "name": "smollm2-135m",
        "digest": DIGEST,
        "context_length": 8192,
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "weight_format": "gguf:Q4_1",
        "block_tokens": 16,
        "layout_version": 1,
        "ready_replicas": 1,
        "created_s": 1_700_000_000,
        "vocab_size": 49152,
    }
    return ServedModel(**{**fields, **changes})


@dataclass
class Script:
    """What a worker does with one request.

    `tokens` of every choice come one by one, those that are known aside; `by_choice`: of each its own. fail_after,
    hang_after and move_after (when it would rather not go on, for move_reason, and before every further token for
    later_reason if there is one) count what this attempt has said of each choice; it goes
    on after such a wish once go_on_after is set.
    fail_admitted: it fails with this status once it is admitted.
    fail_held: it fails instead of being prepared. leave_held: it would rather not go on before it is. prepare_s:
    that takes it so long, every time, and not before prepare_after. takes_more: it may be told more then. prefill_s:
    the first token of one that is not held takes it so long, and so long again for each of the `signs` that it gives
    before; and does not come before answer_after. fail_scoring: it
    fails when it has told log probabilities of so many tokens of the prompt. leave_scoring: it would rather not go on
    while it tells them. repeats: how often the numbers of an embedding stand in it. draws_beside: it is told what
    others draw, and each of its tokens takes pause_s, the first not before draw_after, those of other choices than the
    first not before others_after; it leaves out the position leaves_out, and tells accelerator_s
    of its steps.
    """

    tokens: list[int] = field(default_factory=list)
    by_choice: list[list[int]] = field(default_factory=list)
    finish: int = FINISH_REASON_STOP
    stale: bool = False
    mute: bool = False
    fail_after: int | None = None
    fail_before_admission: grpc.StatusCode | None = None
    fail_admitted: grpc.StatusCode | None = None
    hang_after: int | None = None
    move_after: int | None = None
    move_reason: MoveReason.ValueType = MOVE_REASON_DRAINING
    later_reason: MoveReason.ValueType | None = None
    fail_held: bool = False
    leave_held: bool = False
    prepare_s: float = 0.0
    prepare_after: asyncio.Event | None = None
    go_on_after: asyncio.Event | None = None
    takes_more: bool = False
    draws_beside: bool = False
    draw_after: asyncio.Event | None = None
    others_after: asyncio.Event | None = None
    leaves_out: int | None = None
    accelerator_s: float = 0.0
    prefill_s: float = 0.0
    signs: int = 0
    answer_after: asyncio.Event | None = None
    pause_s: float = 0.0
    cached: int = 0
    chunk: int = 1
    fail_scoring: int | None = None
    leave_scoring: bool = False
    repeats: int = 1


class Scripted(Exception):
    """An attempt fails with this status, as its script says."""


def embedding_of(tokens: Sequence[int]) -> list[float]:
    """What workers say of a prompt: a vector of length one, and float32."""
    vector = [1.0 + len(tokens), 1.0 + tokens[0] % 101, 1.0 + tokens[-1] % 97, 2.0]
    norm = math.hypot(*vector)
    return array("f", [value / norm for value in vector]).tolist()


def _prepared(script: Script) -> Prepared:
    return Prepared(takes_more=script.takes_more, draws_beside=script.draws_beside)


async def _next_batch(outbox: asyncio.Queue[AttemptEvents], silent_s: float) -> ServeBatch:
    """What there is to say, or a sign of life."""
    try:
        async with asyncio.timeout(HEARTBEAT_S):
            return ServeBatch(attempts=[await outbox.get()])
    except TimeoutError:
        return ServeBatch(silent_s=silent_s)


@dataclass
class FakeWorker(WorkerServicer):
    """Answers by `script(request)`; records requests, and calls that are running."""

    worker_id: str
    script: Callable[[WorkerGenerateRequest], Script]
    requests: list[WorkerGenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    running: int = 0
    cancelled: int = 0
    streams: int = 0
    # How often held attempts were told more, and ones that drew already.
    rounds: int = 0
    told_beside: int = 0
    drawing_beside: int = 0
    said_beside: int = 0
    resumes: dict[int, asyncio.Queue[ResumeAttempt]] = field(default_factory=dict)
    # Says nothing any more; heeds no cancels.
    frozen: bool = False
    # For how long one of its processes is told to have been silent.
    silent_s: float = 0.0
    deaf: bool = False
    # What who comes back for an answer hears, instead of nothing.
    kept: WorkerGenerateResponse | None = None
    # How much of a request it says that it understands.
    protocol: int = PROTOCOL
    server: MeshServer = field(default_factory=lambda: MeshServer("127.0.0.1:0", secret=SECRET))

    async def start(self) -> str:
        """Serve; returns the address."""
        full_name = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
        self.server.add(add_WorkerServicer_to_server, self, full_name)
        return await self.server.start()

    async def Serve(self, requests: AsyncIterator[ServeRequest], context: Any) -> AsyncIterator[ServeBatch]:
        self.streams += 1
        outbox: asyncio.Queue[AttemptEvents] = asyncio.Queue()
        tasks: dict[int, asyncio.Task[None]] = {}

        async def read() -> None:
            async for message in requests:
                if message.HasField("start"):
                    tasks[message.start.key] = asyncio.create_task(self._attempt(message.start, outbox))
                elif message.HasField("resume"):
                    if (resume := self.resumes.get(message.resume.key)) is not None:
                        resume.put_nowait(message.resume)
                elif message.HasField("attach"):
                    if self.kept is not None:
                        outbox.put_nowait(AttemptEvents(key=message.attach.key, events=[self.kept], end=AttemptEnd()))
                elif (key := message.cancel or message.detach.key) in tasks and not self.deaf:
                    tasks[key].cancel()

        reading = asyncio.create_task(read())
        try:
            while True:
                batch = await _next_batch(outbox, self.silent_s)
                if self.frozen:
                    await asyncio.Event().wait()
                yield batch
        finally:
            for task in (reading, *tasks.values()):
                task.cancel()

    async def _attempt(self, start: StartAttempt, outbox: asyncio.Queue[AttemptEvents]) -> None:
        self.requests.append(start.request)
        self.metadata.append(dict(start.metadata))
        self.running += 1
        end = AttemptEnd()
        try:
            async for message in self._answer(self.script(start.request), start):
                outbox.put_nowait(AttemptEvents(key=start.key, events=[message]))
        except Scripted as failure:
            end = AttemptEnd(code=failure.args[0].value[0], detail="scripted")
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
            self.resumes.pop(start.key, None)
        outbox.put_nowait(AttemptEvents(key=start.key, end=end))

    async def _answer(self, script: Script, attempt: StartAttempt) -> AsyncIterator[WorkerGenerateResponse]:
        request, known = attempt.request, list(attempt.request.known)
        if request.hold_s:
            self.resumes[attempt.key] = asyncio.Queue()
        if script.fail_before_admission is not None:
            raise Scripted(script.fail_before_admission)
        if script.mute:
            await asyncio.Event().wait()
        if script.stale:
            yield WorkerGenerateResponse(stale=Stale(load=WorkerLoad(waiting_requests=9)))
            return
        admitted = Admitted(worker_id=self.worker_id, cached_tokens=script.cached, protocol=self.protocol)
        yield WorkerGenerateResponse(admitted=admitted)
        if script.fail_admitted is not None:
            raise Scripted(script.fail_admitted)
        if request.hold_s:
            if script.leave_held:
                yield WorkerGenerateResponse(move_wanted=MoveWanted(reason=MOVE_REASON_DRAINING))
            is_held = True
            while is_held:
                await asyncio.sleep(script.prepare_s)
                if script.prepare_after is not None:
                    await script.prepare_after.wait()
                if script.fail_held:
                    raise Scripted(grpc.StatusCode.UNAVAILABLE)
                yield WorkerGenerateResponse(prepared=_prepared(script))
                resume = await self.resumes[attempt.key].get()
                known += resume.further
                is_held = resume.hold
                self.rounds += is_held
        else:
            for _ in range(script.signs):
                await asyncio.sleep(script.prefill_s)
                yield WorkerGenerateResponse(prompt_advanced=PromptAdvanced())
            await asyncio.sleep(script.prefill_s)
            if script.answer_after is not None:
                await script.answer_after.wait()
        if request.embeds:
            if script.fail_after == 0:
                raise Scripted(grpc.StatusCode.UNAVAILABLE)
            values = array("f", embedding_of(request.prompt_token_ids) * script.repeats).tobytes()
            yield WorkerGenerateResponse(embedding=Embedding(values=values))
            usage = Usage(prompt_tokens=len(request.prompt_token_ids), cached=CachedTokens(local=script.cached))
            yield WorkerGenerateResponse(completed=Completed(usage=usage))
            return
        if request.sampling.HasField("num_prompt_logprobs") and not known:
            async for message in self._scores(script, request):
                yield message
        if request.hold_s and script.draws_beside:
            output = self._output_beside(script, request, known, self.resumes[attempt.key])
        else:
            output = self._output(script, request, known)
        async for message in output:
            yield message

    async def _scores(self, script: Script, request: WorkerGenerateRequest) -> AsyncIterator[WorkerGenerateResponse]:
        """Two tokens at a time."""
        top = [TokenLogprob(token_id=20 + i, logprob=-2.0 - i) for i in range(request.sampling.num_prompt_logprobs)]
        tokens = request.prompt_token_ids
        for first in range(1, len(tokens), 2):
            if script.fail_scoring is not None and first > script.fail_scoring:
                raise Scripted(grpc.StatusCode.UNAVAILABLE)
            if script.leave_scoring:
                yield WorkerGenerateResponse(move_wanted=MoveWanted(reason=MOVE_REASON_DRAINING))
            told = PromptLogprobs(first=first)
            for token in tokens[first : first + 2]:
                told.logprobs.add(chosen=TokenLogprob(token_id=token, logprob=-0.5), top=top, rank=9)
            yield WorkerGenerateResponse(prompt_logprobs=told)
            await asyncio.sleep(script.pause_s)

    async def _output(
        self, script: Script, request: WorkerGenerateRequest, outputs: list[KnownOutput]
    ) -> AsyncIterator[WorkerGenerateResponse]:
        whole = script.by_choice or [script.tokens] * request.num_choices
        tokens = [one[: request.max_tokens] for one in whole]
        known = dict.fromkeys(range(request.num_choices), 0)
        for one in outputs:
            known[one.choice] += len(one.token_ids)
        ended = {one.choice for one in outputs if one.finished}
        left = {choice: one[known[choice] :] for choice, one in enumerate(tokens) if choice not in ended}
        for start in range(0, max(map(len, left.values()), default=0) + 1, script.chunk):
            if script.fail_after is not None and start >= script.fail_after:
                raise Scripted(grpc.StatusCode.INTERNAL)
            if script.hang_after is not None and start >= script.hang_after:
                await asyncio.Event().wait()
            if script.move_after is not None and start >= script.move_after:
                reason = script.move_reason if start == script.move_after else script.later_reason or script.move_reason
                yield WorkerGenerateResponse(move_wanted=MoveWanted(reason=reason))
                if script.go_on_after is not None:
                    await script.go_on_after.wait()
            for choice, rest in left.items():
                if part := rest[start : start + script.chunk]:
                    yield WorkerGenerateResponse(tokens=self._chunk(choice, part, request))
            await asyncio.sleep(script.pause_s)
        for choice in left:
            reason = FINISH_REASON_LENGTH if len(tokens[choice]) < len(whole[choice]) else script.finish
            yield WorkerGenerateResponse(finish=WorkerChoiceFinish(choice=choice, reason=reason))  # type: ignore[arg-type]
        usage = Usage(
            prompt_tokens=len(request.prompt_token_ids),
            output_tokens=sum(map(len, left.values())) + sum(known.values()),
            cached=CachedTokens(local=script.cached),
        )
        yield WorkerGenerateResponse(completed=Completed(usage=usage))

    async def _output_beside(
        self,
        script: Script,
        request: WorkerGenerateRequest,
        outputs: list[KnownOutput],
        resumes: asyncio.Queue[ResumeAttempt],
    ) -> AsyncIterator[WorkerGenerateResponse]:
        """A token of each choice at a time; what it is told meanwhile it does not draw."""
        whole = script.by_choice or [script.tokens] * request.num_choices
        tokens = [one[: request.max_tokens] for one in whole]
        told, ended = dict.fromkeys(range(len(tokens)), 0), set[int]()

        def learn(further: Sequence[KnownOutput]) -> None:
            for one in further:
                told[one.choice] += len(one.token_ids)
                said[one.choice] = max(said[one.choice], told[one.choice])
                ended.update([one.choice] if one.finished else [])

        said = dict(told)
        learn(outputs)
        self.drawing_beside += 1
        drawn = 0
        while going := [choice for choice in said if choice not in ended]:
            if drawn == script.fail_after:
                raise Scripted(grpc.StatusCode.INTERNAL)
            positions = {choice: said[choice] for choice in going}
            await asyncio.sleep(script.pause_s)
            if script.draw_after is not None:
                await script.draw_after.wait()
            for choice, position in positions.items():
                if choice and script.others_after is not None:
                    await script.others_after.wait()
                said[choice] = position + 1
                if position == script.leaves_out:
                    continue
                self.said_beside += 1
                part = tokens[choice][position : position + 1]
                chunk = self._chunk(choice, part, request)
                chunk.position, chunk.accelerator_s = position, script.accelerator_s
                yield WorkerGenerateResponse(tokens=chunk)
                if said[choice] == len(tokens[choice]):
                    ended.add(choice)
                    reason = FINISH_REASON_LENGTH if said[choice] < len(whole[choice]) else script.finish
                    yield WorkerGenerateResponse(finish=WorkerChoiceFinish(choice=choice, reason=reason))  # type: ignore[arg-type]
            drawn += 1
            while not resumes.empty():
                self.told_beside += 1
                learn(resumes.get_nowait().further)
        usage = Usage(
            prompt_tokens=len(request.prompt_token_ids),
            output_tokens=sum(said.values()),
            cached=CachedTokens(local=script.cached),
        )
        yield WorkerGenerateResponse(completed=Completed(usage=usage))

    def _chunk(self, choice: int, part: list[int], request: WorkerGenerateRequest) -> TokenChunk:
        logprobs = []
        if request.sampling.HasField("num_logprobs"):
            top = [TokenLogprob(token_id=i, logprob=-9999.0) for i in range(20, 20 + request.sampling.num_logprobs)]
            logprobs = [PositionLogprobs(chosen=TokenLogprob(token_id=token, logprob=-0.5), top=top) for token in part]
        return TokenChunk(choice=choice, token_ids=part, logprobs=logprobs)


@dataclass
class FakeRouter(RouterServicer):
    """Grants every ask to the first worker that is not excluded; records what it is told."""

    workers: dict[str, str] = field(default_factory=dict)
    models: list[ServedModel] = field(default_factory=lambda: [served_model()])
    traffic: list[ModelTraffic] = field(default_factory=list)
    adapters: list[ServedAdapter] = field(default_factory=list)
    aliases: list[ModelAlias] = field(default_factory=list)
    # Digests that asks are refused for, for want of a worker.
    unstaffed: set[bytes] = field(default_factory=set)
    refusal: Refusal | None = None
    mute: bool = False
    # The worker that takes over from every other one.
    taker: str = ""
    asks: list[Ask] = field(default_factory=list)
    dones: list[Done] = field(default_factory=list)
    queues: list[QueueReport] = field(default_factory=list)
    streams: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    server: MeshServer = field(default_factory=lambda: MeshServer("127.0.0.1:0", secret=SECRET))

    async def start(self) -> str:
        """Serve; returns the address."""
        full_name = router_pb2.DESCRIPTOR.services_by_name["Router"].full_name
        self.server.add(add_RouterServicer_to_server, self, full_name)
        return await self.server.start()

    async def Route(self, requests: AsyncIterator[RouteRequest], context: Any) -> AsyncIterator[RouteResponse]:
        self.streams += 1
        async for message in requests:
            if message.HasField("done"):
                self.dones.append(message.done)
                continue
            if message.HasField("queues"):
                self.queues.append(message.queues)
                continue
            self.asks.append(message.ask)
            if not self.mute:
                yield self._answer(message.ask)

    async def WatchModels(self, request: Any, context: Any) -> AsyncIterator[ModelSnapshot]:
        while True:
            yield ModelSnapshot(models=self.models, traffic=self.traffic, adapters=self.adapters, aliases=self.aliases)
            self.changed.clear()
            await self.changed.wait()

    def set_aliases(self, aliases: dict[str, str]) -> None:
        """Report other names of models."""
        self.aliases = [ModelAlias(name=name, model=model) for name, model in aliases.items()]
        self.changed.set()

    def set_models(
        self, *models: ServedModel, traffic: ModelTraffic | None = None, adapters: Sequence[ServedAdapter] = ()
    ) -> None:
        """Report other models."""
        self.adapters = list(adapters)
        self.models, self.traffic = list(models), [traffic] if traffic is not None else []
        self.changed.set()

    def _handoff(self, ask: Ask, giver: str) -> Handoff:
        step = PullStep(kind=LOCATION_KIND_WORKER, location_id=giver, epoch=1, num_blocks=1, wait_s=3.0)
        address = self.workers[self.taker]
        return Handoff(attempt=ask.attempt + 1, worker_id=self.taker, worker_address=address, pull_plan=[step])

    def _answer(self, ask: Ask) -> RouteResponse:
        identity = {"request_id": ask.request_id, "attempt": ask.attempt}
        if self.refusal is not None:
            refusal = Refusal()
            refusal.CopyFrom(self.refusal)
            refusal.request_id, refusal.attempt = ask.request_id, ask.attempt
            return RouteResponse(refusal=refusal)
        for worker_id, address in self.workers.items():
            if worker_id not in ask.excluded_workers and ask.model_digest not in self.unstaffed:
                grant = Grant(**identity, worker_id=worker_id, worker_epoch=1, worker_address=address, policy="fake")
                if self.taker not in ("", worker_id) and ask.can_hand_off and not ask.resumes:
                    grant.handoff.CopyFrom(self._handoff(ask, worker_id))
                return RouteResponse(grant=grant)
        return RouteResponse(refusal=Refusal(**identity, reason=router_pb2.REFUSAL_REASON_NO_WORKER))
