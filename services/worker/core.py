"""The engine without its model and sockets: messages in, messages out, and between them steps to run. Pure.

The owner hands in messages (`handle`), takes a step (`schedule`), runs it and hands its result back (`commit` or
`fail_step`), and sends what has gathered in `to_front` and `to_mover`. Time is an argument: seconds of any one clock.
Every request handed in gets exactly one terminal message: StaleRequest, RequestFailed or its RequestUsage; an aborted
one gets none, its sender having gone, but its figures are told (RequestAborted) once its prompt has been computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from services.common.blocks import BLOCK_TOKENS, BlockId, join_ids
from services.worker.adapters.source import AdapterSource
from services.worker.admission import SchedulerLimits
from services.worker.block_pool import BlockPool
from services.worker.chunk import Advance, Chunk
from services.worker.drain_pace import DrainPace
from services.worker.drawing import draw_rows, drawn_of, faults, output_of, reads_of, told_of
from services.worker.draws import Draws
from services.worker.engine_load import engine_load
from services.worker.engine_messages import BlockChanges, DrainEngine, EngineLoad, PushTarget
from services.worker.errors import QueueFull, Refused
from services.worker.following import GrammarSource
from services.worker.link_rates import LinkRates
from services.worker.messages import (
    Abort,
    AdmittedRequest,
    ChoiceOutput,
    Message,
    MoveRequested,
    PreparedRequest,
    RequestAborted,
    RequestFailed,
    RequestUsage,
    Resume,
    StaleRequest,
    StepOutput,
    Submit,
)
from services.worker.mover_messages import PinBlocks, PullBlocks, PullCut, PullDone, PushDone, Unpin
from services.worker.prompt_signs import signs
from services.worker.rates import Rates
from services.worker.requests import known_by_choice, request_of, usage_of
from services.worker.scheduler import Scheduler
from services.worker.sequence import Request
from services.worker.step_fit import step_work
from services.worker.step_shares import charge_step
from services.worker.transfers import TransferLimits, Transfers


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """Bounds of the engine. A step's tokens are at most step_token_budget and what fits target_step_s."""

    scheduler: SchedulerLimits
    transfers: TransferLimits = field(default_factory=TransferLimits)
    step_token_budget: int = 512
    target_step_s: float = 0.2


class EngineCore:
    """Scheduler, pool and transfers of one replica behind messages."""

    draw_rows = staticmethod(draw_rows)

    def __init__(
        self,
        limits: CoreLimits,
        num_blocks: int,
        block_key: bytes,
        rates: Rates,
        links: LinkRates,
        grammars: GrammarSource | None = None,
        adapters: AdapterSource | None = None,
    ) -> None:
        """grammars, adapters: None where draws follow none, and the runner has none; requests with one are refused."""
        self.to_front: list[Message] = []
        self.to_mover: list[Message] = []
        # Set at admissions and finishes; the owner sends a load and clears it.
        self.load_changed = False
        self.rates = rates
        self._links = links
        self._grammars = grammars
        self._adapters = adapters
        self.pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(limits.scheduler, self.pool, block_key, self._is_parked)
        # Transfers may not take so many slots that nothing else runs.
        transfers = replace(
            limits.transfers,
            max_push_blocks=min(limits.transfers.max_push_blocks, num_blocks // 4),
            max_served_blocks=min(limits.transfers.max_served_blocks, num_blocks // 4),
        )
        self.transfers = Transfers(transfers, self.pool, links)
        self._limits = limits
        self._progress = 0
        self._draining = False
        self.drain_pace = DrainPace()

    @property
    def is_idle(self) -> bool:
        """Whether no request is here and the mover holds nothing."""
        return not self.scheduler.requests and self.transfers.is_idle

    def handle(self, message: Message, now: float) -> None:
        """Take in one message of the front or the mover."""
        match message:
            case Submit():
                self._submit(message, now)
            case Resume():
                self._resume(message)
            case Abort(key=key):
                self._abort(key, now)
            case DrainEngine():
                self._draining = True
                self.drain_pace.begin(self.rates.decode_step_s, now)
            case PushTarget(location_id=location_id, epoch=epoch):
                self.transfers.pushes.set_target((location_id, epoch) if location_id else None, now)
            case PullCut():
                self._enqueue_pulled(self.transfers.cut_pull(message, now))
            case PullDone():
                self._enqueue_pulled(self.transfers.finish_pull(message, now))
            case PushDone():
                self.transfers.pushes.finish(message)
                self.to_mover.extend(self.transfers.pushes.due(now))
            case PinBlocks():
                answer = self.transfers.pins.pin(message, self._is_coming)
                self.to_mover.extend([] if answer is None else [answer])
            case Unpin(key=key):
                self.transfers.pins.unpin(key)
        self._announce()

    def fail_request(self, key: int, code: str, detail: str) -> None:
        """End a request with an error; nothing when it is not here."""
        if self._remove(key):
            self.to_front.append(RequestFailed(key, code, detail))

    def expire(self, now: float) -> None:
        """End the requests whose deadline has passed, and those that were held in vain."""
        requests = self.scheduler.requests.values()
        late = [request.key for request in requests if request.deadline_s <= now]
        for key in late:
            self.fail_request(key, "DEADLINE_EXCEEDED", "the deadline passed while the request was served")
        held = [request.key for request in requests if request.held_until_s is not None and request.held_until_s <= now]
        for key in held:
            self.fail_request(key, "ABORTED", "the attempt was held and not resumed in time")

    @property
    def is_preparing(self) -> bool:
        """Whether there will be grammars or adapters to take."""
        return any(source is not None and not source.is_settled for source in (self._grammars, self._adapters))

    def take_grammars(self) -> None:
        """Let the requests go on whose grammars have been compiled, and end those whose grammars cannot be."""
        for key, outcome in self._grammars.take() if self._grammars is not None else ():
            request = self.scheduler.requests.get(key)
            if request is None:
                continue
            if isinstance(outcome, Refused):
                self.fail_request(key, outcome.code, outcome.detail)
                continue
            for sequence in request.sequences:
                sequence.follower = outcome.follower()
            request.awaits_grammar = False
            self._enqueue(request)

    def take_adapters(self, now: float) -> None:
        """Let the requests go on whose adapters are there, and end those that get none."""
        for key, outcome in self._adapters.take(now) if self._adapters is not None else ():
            request = self.scheduler.requests.get(key)
            if request is None:
                continue
            if isinstance(outcome, Refused):
                self.fail_request(key, outcome.code, outcome.detail)
                continue
            request.adapter_slot = outcome
            request.awaits_adapter = False
            self._enqueue(request)

    def schedule(self, now: float) -> list[Chunk]:
        """What to compute next; empty when there is nothing."""
        chunks = self.scheduler.schedule(self._step_tokens, now, self.rates.steps.latest_costs)
        self.to_front += [self._prepared(key, now) for key in self.scheduler.take_prepared()]
        self.to_front += [MoveRequested(key, reason) for key, reason in self.scheduler.moves.take()]
        return chunks

    @property
    def _step_tokens(self) -> int:
        """Most tokens of the next step."""
        return self.rates.token_budget(self._limits.step_token_budget, self._limits.target_step_s)

    def commit(self, chunks: Sequence[Chunk], draws: Draws, step_s: float, now: float) -> None:
        """Take in the result of a step that took `step_s`; the rows of `draws` are those of `draw_rows`."""
        charge_step(chunks, self.rates.steps.latest_costs, step_s)
        drawn, reads = drawn_of(chunks, draws), reads_of(chunks, draws)
        for key, code, detail in faults(chunks, drawn, reads):
            self.fail_request(key, code, detail)
        told = [told_of(chunk, one) for chunk, one in zip(chunks, reads, strict=True) if one]
        said = [*(one for one in told if one is not None), *signs(chunks, now)]
        self.to_front += [one for one in said if one.key in self.scheduler.requests]
        work = step_work(chunks)
        by_sequence = {id(chunk.sequence): one for chunk, one in zip(chunks, drawn, strict=True)}
        choices: list[ChoiceOutput] = []
        completed: list[RequestUsage] = []
        for advance in self.scheduler.commit(chunks, [one.tokens for one in drawn], now):
            self._offer(advance, now)
            if advance.tokens:
                choices.append(output_of(advance, by_sequence[id(advance.sequence)]))
            if advance.finish and self.scheduler.finish(advance.sequence):
                self._release_adapter(advance.sequence.request.key)
                completed.append(usage_of(advance.sequence.request))
        if choices or completed:
            self.to_front.append(StepOutput(choices, completed))
        self.load_changed |= bool(completed)
        self.rates.observe_step(work, step_s, drafted=sum(chunk.drafted for chunk in chunks))
        self.scheduler.speculation.observe_step(chunks, [len(one.tokens) for one in drawn], step_s)
        self.to_mover.extend(self.transfers.pushes.due(now))
        self._announce()

    def fail_step(self, chunks: Sequence[Chunk], detail: str) -> None:
        """A step could not be run: end the requests in it. Its blocks were never made reusable."""
        for key in {chunk.sequence.request.key for chunk in chunks}:
            self.fail_request(key, "INTERNAL", detail)
        self._announce()

    def load(self, now: float) -> EngineLoad:
        """The present load; each call counts as progress of the loop."""
        self._progress += 1
        return engine_load(
            self.scheduler,
            self.pool,
            self.transfers,
            self.rates,
            progress=self._progress,
            step_tokens=self._step_tokens,
            holders=self._links.messages(now),
            adapters=self._adapters.figures if self._adapters is not None else None,
        )

    def _submit(self, message: Submit, now: float) -> None:
        try:
            request, hits = self._admitted(message, now)
        except Refused as refusal:
            self.to_front.append(RequestFailed(message.key, refusal.code, refusal.detail))
            return
        except QueueFull:
            self.to_front.append(StaleRequest(message.key))
            return
        pull = self._start_pull(request, hits, now)
        cached = (hits + (len(pull.slots) if pull else 0)) * BLOCK_TOKENS
        self.to_front.append(AdmittedRequest(message.key, min(cached, len(request.prompt))))
        self.load_changed = True
        if pull is not None:
            request.awaits_pull = True
            self.to_mover.append(pull)
        if request.is_finished:
            self._complete(request)
            return
        self._prepare(request, message, now)

    def _prepare(self, request: Request, message: Submit, now: float) -> None:
        """Have compiled and loaded what an admitted request needs before it can be computed."""
        if message.sampling.grammar and self._grammars is not None:
            request.awaits_grammar = True
            self._grammars.begin(request.key, message.sampling.grammar)
        if message.adapter is not None and self._adapters is not None:
            request.awaits_adapter = True
            self._adapters.begin(request.key, message.adapter, now)
        self._enqueue(request)
        self.take_grammars()
        self.take_adapters(now)

    def _admitted(self, message: Submit, now: float) -> tuple[Request, int]:
        """The request, now the scheduler's, and its leading blocks that are here. Raises Refused and QueueFull."""
        if self._draining:
            raise Refused("UNAVAILABLE", "the worker is draining")
        if message.deadline_s <= 0:
            raise Refused("DEADLINE_EXCEEDED", "the deadline passed before the request arrived")
        if message.sampling.grammar and self._grammars is None:
            raise Refused("INVALID_ARGUMENT", "this worker's answers follow no grammars")
        if message.adapter is not None and self._adapters is None:
            raise Refused("FAILED_PRECONDITION", "this worker has no adapters")
        if message.adapter is not None and self._adapters is not None and not self._adapters.has_room(message.adapter):
            raise QueueFull
        request = request_of(message, now)
        return request, self.scheduler.admit(request, self.rates.prefill_tokens_per_s)

    def _start_pull(self, request: Request, hits: int, now: float) -> PullBlocks | None:
        if not request.pull_plan or not self._limits.scheduler.prefix_cache:
            return None
        return self.transfers.start_pull(
            request,
            hits,
            now,
            reserve=self.scheduler.num_running,
            block_compute_s=BLOCK_TOKENS / self.rates.prefill_tokens_per_s,
        )

    def _prepared(self, key: int, now: float) -> PreparedRequest:
        request = self.scheduler.requests[key]
        return PreparedRequest(key, request.pull_s, now - request.arrival_s - request.pull_s)

    def _resume(self, message: Resume) -> None:
        request = self.scheduler.requests.get(message.key)
        if request is None:
            return
        try:
            self.scheduler.resume(request, known_by_choice(message.further), hold=message.hold)
        except Refused as refusal:
            self.fail_request(message.key, refusal.code, refusal.detail)
            return
        if request.is_finished:
            self._complete(request)

    def _complete(self, request: Request) -> None:
        """Nothing is left to draw of a request, and no step will say so."""
        self._remove(request.key)
        self.to_front.append(StepOutput([], [usage_of(request)]))

    def _abort(self, key: int, now: float) -> None:
        request = self.scheduler.requests.get(key)
        if request is not None and request.prefilled:
            self.to_front.append(RequestAborted(usage_of(request), now - request.arrival_s, request.traceparent))
        if self._draining:
            self.drain_pace.left(now)
        self._remove(key)

    def _enqueue_pulled(self, request: Request | None) -> None:
        """The pull of `request` has ended, or is given up."""
        # Routers count what is in flight.
        self.load_changed = True
        if request is not None:
            request.awaits_pull = False
            self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        if not (request.awaits_pull or request.awaits_grammar or request.awaits_adapter):
            self.scheduler.enqueue(request)

    def _remove(self, key: int) -> bool:
        request = self.scheduler.remove(key)
        if request is None:
            return False
        self._release_adapter(key)
        self._give_up_pins(request)
        cancel = self.transfers.cancel_pull(key)
        if cancel is not None:
            self.to_mover.append(cancel)
        self.load_changed = True
        return True

    def _is_parked(self, request: Request) -> bool:
        """Whether it waits for a place for its adapter, which another request has until its end."""
        return request.awaits_adapter and self._adapters is not None and self._adapters.waits_for_place(request.key)

    def _release_adapter(self, key: int) -> None:
        if self._adapters is not None:
            self._adapters.release(key)

    def _offer(self, advance: Advance, now: float) -> None:
        if advance.completed_slot is not None:
            push = self.transfers.pushes.completed(advance.sequence.request, advance.completed_slot, now)
            if push is not None:
                self.to_mover.append(push)

    def _is_coming(self, block: BlockId) -> bool:
        """Whether a prompt has this block, computed or not."""
        return any(block in request.prompt_ids for request in self.scheduler.requests.values())

    def _give_up_pins(self, gone: Request) -> None:
        """Let nobody wait for blocks that only `gone` would have computed."""
        waited_for = self.transfers.pins.awaited.intersection(gone.prompt_ids)
        if waited_for:
            others = (request.prompt_ids for request in self.scheduler.requests.values())
            self.to_mover.extend(self.transfers.pins.give_up(waited_for.difference(*others)))

    def _announce(self) -> None:
        self.to_mover.extend(self.transfers.pins.settle())
        adds, removes = self.pool.take_changes()
        if adds or removes:
            self.transfers.pushes.forget(removes)
            self.to_front.append(BlockChanges(join_ids(adds), join_ids(removes)))
