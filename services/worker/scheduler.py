"""The scheduler: what the next step computes, and what its result means. Pure: no clock, no torch, no sockets.

One mechanism: each step spends a token budget on bringing `num_computed` of sequences up to `num_tokens`. Decoding
sequences come first, one token each, so that a long prompt does not stall them; then those that go on after a little
output of another worker, for which a client may wait; then chunks of running prefills; then waiting sequences, which
start with the blocks that the pool has already. Batch work stands aside where prompts of others are computed, but for
one step in many, in which some of its prompts come before these (patience.py). When blocks run out the sequence that
came last by (priority, arrival) gives up its blocks and waits; it resumes by recomputation, mostly from cached blocks.

Drafted tokens (speculation.py) are known to a step alone: it computes them behind the known ones, and only those that
are drawn in their places become known.

A held request is computed like any other up to its last known token. It keeps its place and its slots while it waits
to be resumed, in the same order as the rest: what came later is preempted before it, what came before is not kept from
running. When it is resumed, what has become known meanwhile is one more chunk of prefill; so is what another attempt,
which draws the same, has drawn before it from then on.

Invariants: only RUNNING sequences hold slots. A running sequence has slots for every known token except, while it
decodes, perhaps the last, or those it was resumed with; it may have a block more, taken for a draft. The first running
sequence is never preempted for another, so work always ends: a held one ends when its time is up.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items

from services.common.blocks import BLOCK_TOKENS
from services.common.step_costs import StepCosts
from services.worker.admission import SchedulerLimits, check_known, check_request
from services.worker.ahead import Ahead, check_queue
from services.worker.block_pool import BlockPool
from services.worker.chunk import MOST_ROWS_READ, Advance, Chunk, prompt_chunk
from services.worker.errors import Refused
from services.worker.moves import MoveWishes
from services.worker.patience import Patience, is_patient
from services.worker.prompt_budget import MIN_PREFILL_TOKENS, prompt_budget, prompt_chunks
from services.worker.queue_state import QueueState, queue_state
from services.worker.registration import Registration
from services.worker.sequence import Known, Request, Sequence, Status, blocks_for
from services.worker.speculation import Speculation


class Scheduler:
    """Holds every admitted request until it has finished or is removed."""

    def __init__(
        self, limits: SchedulerLimits, pool: BlockPool, block_key: bytes, is_parked: Callable[[Request], bool]
    ) -> None:
        """is_parked: see Ahead."""
        self.requests: dict[int, Request] = {}
        self.preemptions = 0
        self.moves = MoveWishes()
        self._limits = limits
        self._pool = pool
        self._is_parked = is_parked
        self._registration = Registration(pool, block_key)
        self.speculation = Speculation(pool, limits.speculation_tokens, limits.speculation_rows)
        # Both in (priority, arrival) order.
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._patience = Patience()
        self._arrivals = 0
        # Held requests of which nobody has been told that they are prepared; some may be gone.
        self._unprepared: set[int] = set()

    @property
    def num_running(self) -> int:
        """Sequences that hold slots."""
        return len(self._running)

    @property
    def queued_prefill_tokens(self) -> int:
        """See QueueState."""
        return self.queue.prefill_tokens

    @property
    def queue(self) -> QueueState:
        """What is before the engine now."""
        return queue_state(self._running, self._waiting, self._ahead.expected_tokens)

    def admit(self, request: Request, prefill_tokens_per_s: float) -> int:
        """Give `request` its place, with sequences that do not wait yet (`enqueue`).

        Returns the leading blocks that the pool has of the leader's. Raises Refused when it could never be served and
        QueueFull when the queue is too long for it; nothing is kept of it then.
        """
        if request.key in self.requests:
            raise Refused("ALREADY_EXISTS", "this attempt is being served already")
        check_request(request, self._limits, self._pool.num_blocks)
        if request.embeds:
            request.rows_to_read = len(request.prompt)
            request.rows_read = 0 if self._limits.pooling == "mean" else len(request.prompt) - 1
        self._arrivals += 1
        request.sequences = [self._sequence(request, choice) for choice in range(request.num_choices)]
        hits = len(self._pool.match(request.hit_ids)) if self._limits.prefix_cache else 0
        check_queue(self._ahead, request, hits, self._limits.max_queue_s * prefill_tokens_per_s)
        self.requests[request.key] = request
        if request.is_held:
            self._unprepared.add(request.key)
        return hits

    def enqueue(self, request: Request) -> None:
        """Let the sequences of an admitted request be scheduled."""
        for sequence in request.sequences:
            if sequence.status is Status.PULLING:
                sequence.status = Status.WAITING
                bisect.insort(self._waiting, sequence, key=_order)

    def resume(self, request: Request, further: Mapping[int, Known], *, hold: bool = False) -> None:
        """Let a request that was held draw on after `further`, as far as it has not drawn that itself.

        hold: only compute that; it is prepared once more afterwards. Raises Refused where it cannot.
        """
        if not request.was_held or (hold and not request.is_held):
            raise Refused("INVALID_ARGUMENT", "the attempt is not held")
        if not request.is_held:
            further = _unheard(request, further)
        check_known(request, further, self._limits.vocab_size)
        if hold:
            self._unprepared.add(request.key)
        else:
            request.held_until_s = None
        for choice, output in further.items():
            request.sequences[choice].append(output)
            request.output_tokens += len(output.tokens)
            request.known_tokens += len(output.tokens)
            if output.finished:
                self._end(request.sequences[choice])

    def take_prepared(self) -> list[int]:
        """Keys of held requests that have computed all they may; each is told once."""
        held = [self.requests[key] for key in self._unprepared if key in self.requests]
        prepared = [request.key for request in held if request.is_held and request.is_prepared]
        self._unprepared = {request.key for request in held if request.is_held}.difference(prepared)
        return prepared

    def remove(self, key: int) -> Request | None:
        """Forget a request and release all its sequences hold; None when it is not here. Idempotent."""
        request = self.requests.pop(key, None)
        if request is not None:
            for sequence in request.sequences:
                self._end(sequence)
        return request

    def schedule(self, token_budget: int, now: float, costs: StepCosts) -> list[Chunk]:
        """The next step's chunks; empty when nothing can be computed. Decodes and MIN_PREFILL_TOKENS are always in.

        Batch work is in where it does not stand aside. costs: of steps, as learned.
        """
        decoding = [
            Chunk(sequence, sequence.num_computed, 1, draws=True)
            for sequence in tuple(self._running)
            if sequence.status is Status.RUNNING and self._ensure_slots(sequence) and sequence.is_decoding
        ]
        behind = [one for one in self._running if one.has_slots and one.is_catching_up]
        catching_up = [prompt_chunk(one, one.num_due, MOST_ROWS_READ) for one in behind]
        chunks = decoding + catching_up
        if any(line and not is_patient(line[0].request) for line in (self._running, self._waiting)):
            self._patience.urgent_seen(now)
        is_due = self._patience.is_due
        budget = prompt_budget(token_budget, decoding if is_due else _urgent(decoding), catching_up)
        kept = self._kept_for_patient(budget) if is_due else 0
        prompts = prompt_chunks(self._prefills(now, patient=False), budget - kept, MOST_ROWS_READ - kept)
        if self._patience.stands_aside(beside_urgent=bool(prompts)):
            chunks = _urgent(chunks)
        else:
            budget = prompt_budget(token_budget, decoding, catching_up)
            prompts += self._patient_prompts(prompts, budget, token_budget, now)
        budget -= sum(chunk.length for chunk in prompts)
        chunks = self.speculation.extend(chunks + prompts, budget, costs, len(self._running))
        self.moves.watch_blocks(self._running, self._pool.num_available)
        return chunks

    def commit(self, chunks: Items[Chunk], tokens: Items[list[int]], now: float) -> list[Advance]:
        """Take in a step that has run; `tokens[i]` are those that chunk i drew and that hold (drawing.py)."""
        return [
            self._advance(chunk, drawn, now)
            for chunk, drawn in zip(chunks, tokens, strict=True)
            if chunk.sequence.status is Status.RUNNING
        ]

    @property
    def _ahead(self) -> Ahead:
        return Ahead(self.requests.values(), self._running, self._waiting, self._pool, self._limits, self._is_parked)

    def _sequence(self, request: Request, choice: int) -> Sequence:
        """A choice with the ids of all full blocks that are known of it; it does not wait yet."""
        sequence, known = Sequence(request, choice, self._arrivals), request.known.get(choice)
        if known is not None and known.finished:
            sequence.status = Status.FINISHED
            return sequence
        sequence.status = Status.PULLING
        if self._reuses(request):
            self._registration.name_blocks(sequence, sequence.num_tokens)
        return sequence

    def _reuses(self, request: Request) -> bool:
        return self._limits.prefix_cache and request.is_cacheable

    def _patient_prompts(self, others: Items[Chunk], budget: int, token_budget: int, now: float) -> list[Chunk]:
        """Of batch work, what is left of `budget` and of the rows that may be read beside prompts of others."""
        left = budget - sum(chunk.length for chunk in others)
        readable = MOST_ROWS_READ - sum(chunk.read for chunk in others)
        most = self._patience.most_tokens(token_budget, MIN_PREFILL_TOKENS, now)
        return prompt_chunks(self._prefills(now, patient=True), min(left, most), readable)

    def _kept_for_patient(self, budget: int) -> int:
        """Tokens that prompts of batch work have before those of others, in the step that is its turn."""
        is_prompt = any(is_patient(one.request) and not one.is_decoding for one in self._running)
        waits = bool(self._waiting) and is_patient(self._waiting[-1].request)
        return min(MIN_PREFILL_TOKENS, -(-budget // 2)) if is_prompt or waits else 0

    def _prefills(self, now: float, *, patient: bool) -> Iterator[Sequence]:
        """Running prefills, then waiting sequences as they start, while there is room: of batch work, or all others."""
        running = [s for s in self._running if is_patient(s.request) is patient and s.has_slots]
        yield from [s for s in running if not (s.is_decoding or s.is_catching_up)]
        while (sequence := self._next_to_start(patient=patient)) is not None:
            lacking = self._lacking(sequence)
            if lacking is not None:
                # Nobody overtakes a sequence that lacks blocks, or it might wait for ever.
                self.moves.make_room(sequence.request, self._running, lacking, self._freed_by)
                return
            self._start(sequence, now)
            self._waiting.remove(sequence)
            bisect.insort(self._running, sequence, key=_order)
            yield sequence

    def _next_to_start(self, *, patient: bool) -> Sequence | None:
        """The first that may start; siblings of a leader start when their prompt has been computed.

        patient: of batch work, which overtakes those that lack tokens of a step alone, and no others.
        """
        able = (s for s in self._waiting if s.request.prefilled or s is s.request.leader)
        first = next(able, None)
        if first is None or is_patient(first.request) is patient:
            return first
        if not patient:
            return None
        return first if self._lacking(first) is not None else next((s for s in able if is_patient(s.request)), None)

    def _hits(self, sequence: Sequence) -> list[int]:
        return self._pool.match(sequence.hit_ids) if self._limits.prefix_cache else []

    def _lacking(self, sequence: Sequence) -> int | None:
        """Blocks that are missing for its start, 0 where a place is; None: it can start."""
        if len(self._running) >= self._limits.max_running:
            return 0
        pool, hits = self._pool, self._hits(sequence)
        needed = blocks_for(sequence.num_tokens) - len(hits)
        # Running sequences need a block each before long: starting without a reserve would preempt at once.
        lacking = needed + len(self._running) - (pool.num_available - pool.count_unreferenced(hits))
        return lacking if lacking > 0 else None

    def _start(self, sequence: Sequence, now: float) -> None:
        """Take hits and slots for all known tokens."""
        pool, request, hits = self._pool, sequence.request, self._hits(sequence)
        pool.hold(hits)
        fresh = pool.allocate(blocks_for(sequence.num_tokens) - len(hits))
        assert fresh is not None
        sequence.use_slots(hits + fresh)
        sequence.num_computed = len(hits) * BLOCK_TOKENS
        sequence.num_registered = len(hits)
        sequence.status = Status.RUNNING
        if request.first_step_s is None:
            request.first_step_s = now
            _count_cached(request, len(hits))
        self._note_prefilled(sequence, now)

    def _freed_by(self, request: Request) -> int:
        """Blocks that its going would free."""
        return self._pool.count_freed([slot for sequence in request.sequences for slot in sequence.slots])

    def _ensure_slots(self, sequence: Sequence) -> bool:
        """Slots for all known tokens, preempting those that came later; False when it must wait."""
        if sequence.has_slots:
            return True
        missing = blocks_for(sequence.num_tokens) - len(sequence.slots)
        while (slots := self._pool.allocate(missing)) is None:
            victim = self._running[-1]
            if victim is sequence and len(self._running) == 1:
                # Only transfers hold the rest, and they end by their deadlines.
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.use_slots(slots)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.moves.preempted(sequence.request)
        self._running.remove(sequence)
        self._pool.release(sequence.drop_slots())
        sequence.status = Status.WAITING
        bisect.insort(self._waiting, sequence, key=_order)

    def _advance(self, chunk: Chunk, drawn: list[int], now: float) -> Advance:
        sequence, request = chunk.sequence, chunk.sequence.request
        request.rows_read += chunk.read
        sequence.tokens[sequence.num_tokens : sequence.num_tokens + len(drawn)] = drawn
        sequence.num_tokens += len(drawn)
        request.output_tokens += len(drawn)
        # All but the last of those drawn were guesses, and have been computed.
        sequence.num_computed = chunk.start + chunk.length - chunk.drafted + max(0, len(drawn) - 1)
        completed_slot = self._registration.register(sequence) if self._reuses(request) else None
        self._note_prefilled(sequence, now)
        finish = "stop" if request.embeds and not sequence.num_missing else ""
        if drawn:
            self.speculation.observe(chunk, len(drawn) - 1)
            if drawn[-1] in request.stop_token_ids:
                finish = "stop"
            elif sequence.num_output >= request.max_tokens:
                finish = "length"
        return Advance(sequence, drawn, finish, completed_slot)

    def _note_prefilled(self, sequence: Sequence, now: float) -> None:
        request = sequence.request
        if not request.prefilled and (sequence.num_computed >= sequence.num_prompt or not sequence.num_due):
            request.prefilled = True
            request.prefill_end_s = now

    def finish(self, sequence: Sequence) -> bool:
        """End a choice; True when it was the last of its request, which is forgotten then."""
        self._end(sequence)
        if not sequence.request.is_finished:
            return False
        del self.requests[sequence.request.key]
        return True

    def _end(self, sequence: Sequence) -> None:
        if sequence.status is Status.RUNNING:
            self._running.remove(sequence)
            self._pool.release(sequence.drop_slots())
        elif sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
        sequence.status = Status.FINISHED


def _unheard(request: Request, further: Mapping[int, Known]) -> dict[int, Known]:
    """What is new of `further` to choices that draw; of those that have ended nothing."""
    drawn = {choice: one for choice, one in enumerate(request.sequences) if choice in further}
    new = {choice: one.unheard(further[choice]) for choice, one in drawn.items() if one.status is not Status.FINISHED}
    return {choice: output for choice, output in further.items() if choice not in drawn} | new


def _urgent(chunks: Items[Chunk]) -> list[Chunk]:
    """Those that are not of batch work."""
    return [chunk for chunk in chunks if not is_patient(chunk.sequence.request)]


def _count_cached(request: Request, hits: int) -> None:
    """The first step of `request` starts after so many blocks; what they hold of the prompt is told by tier."""
    num_prompt = len(request.prompt)
    for index in range(min(hits, blocks_for(num_prompt))):
        tier = request.pulled_tiers.get(index, "local")
        tokens = min(BLOCK_TOKENS, num_prompt - index * BLOCK_TOKENS)
        request.cached_tokens[tier] = request.cached_tokens.get(tier, 0) + tokens


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order
