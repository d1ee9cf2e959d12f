"""A simulated worker: continuous batching with chunked prefill over a prefix cache, advanced in closed form. Pure.

The rules are those of the real scheduler: decoding sequences come first with one token each, then prompts in order of
arrival share what is left of the step's token budget, and a waiting prompt starts with the blocks that the cache has
by then. Steps of the same composition make one segment, which ends where the composition changes: at the last chunk
of a prompt, the end of an answer, a shortage of blocks, or the first step after something arrived. So a worker is
advanced once for each segment, at `end_s`, and not once for each step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from services.common.blocks import BlockId
from services.common.learned_speed import LearnedSpeed
from services.router.simulator.block_cache import BlockCache
from services.router.simulator.decoding import Decoding
from services.router.simulator.forecast import Lookahead, Prompt
from services.router.simulator.job import MIN_PREFILL_TOKENS, Advanced, Job, WorkerProfile, WorkerState
from services.router.simulator.segment import Segment


class SimWorker:
    """`submit` requests, and `advance` at every `end_s`; both raise it."""

    def __init__(self, profile: WorkerProfile) -> None:
        self.profile = profile
        self.cache = BlockCache(profile.num_blocks)
        self.rates = LearnedSpeed(profile.time_model.prefill_tokens_per_s, profile.time_model.step_s(0, 1))
        self.busy_s = 0.0
        self.prefilled_tokens = 0
        self.preemptions = 0
        self._arrivals = 0
        self._waiting: deque[Job] = deque()
        self._prefilling: dict[Job, None] = {}
        self._decoding = Decoding(self.cache, profile.block_tokens)
        self._waiting_tokens = 0
        self._expected: dict[Job, int] = {}
        self._segment = Segment()

    @property
    def end_s(self) -> float:
        """When the worker is to be advanced next; infinite while it is idle."""
        return self._segment.end_s

    @property
    def jobs(self) -> list[Job]:
        """All that are here, in no particular order."""
        return [*self._decoding, *self._prefilling, *self._waiting]

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._decoding or self._prefilling or self._waiting)

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Whether such a request could ever be served."""
        return self._blocks(prompt_tokens + output_tokens) + 1 <= self.profile.num_blocks

    def is_stale(self, job: Job, expected_hit_blocks: int) -> bool:
        """Whether the decision for `job` no longer fits: more would wait than may, or than the decision knew of."""
        if self.is_idle:
            return False
        places, blocks, excess = self._room()
        hits = self.cache.match(self._usable(job))
        tokens = job.known_tokens - hits * self.profile.block_tokens
        excess = excess + tokens if places < 1 or self._blocks(tokens) > blocks else 0
        excess += max(0, expected_hit_blocks - hits) * self.profile.block_tokens
        return excess > self.profile.max_queue_s * self.rates.prefill_tokens_per_s

    def submit(self, job: Job, now_s: float) -> None:
        """Take a request in; it joins the first step that begins after now."""
        self._arrivals += 1
        job.arrival = self._arrivals
        was_blocked = bool(self._waiting)
        self._wait(job)
        if not self._segment.steps:
            self._plan(now_s)
        elif not self._segment.chunks and not was_blocked:
            # The segment ends with the step that runs now.
            self._segment = replace(self._segment, steps=self._segment.steps_begun(now_s))

    def receive(self, ids: Sequence[BlockId]) -> None:
        """A pull has brought a prompt's leading blocks: they join the cache as far as there is room."""
        hits = self.cache.match(ids)
        self.cache.hold(ids[:hits])
        new = ids[hits:][: self.cache.available]
        self.cache.take(len(new))
        self.cache.register(new)
        self.cache.release(ids[: hits + len(new)])

    def advance(self) -> Advanced:
        """The segment is over: take its results in and begin the next."""
        segment, now_s = self._segment, self.end_s
        self.rates.observe(segment.prefill_tokens, len(self._decoding), segment.step_s, segment.steps)
        self.busy_s += segment.steps * segment.step_s
        self.prefilled_tokens += segment.prefill_tokens * segment.steps
        result = Advanced(finished=self._decoding.advance(segment.steps))
        for job, tokens in segment.chunks:
            job.missing -= tokens * segment.steps
            if self._register(job):
                result.computed.append((job, job.shared))
            if not job.missing:
                self._draw(job, now_s, result)
        for job in result.finished:
            self._free(job)
        self._plan(now_s)
        return result

    def state(self, now_s: float) -> WorkerState:
        """As of now, within the present segment."""
        done = self._segment.steps_done(now_s)
        computed = done * self._segment.prefill_tokens
        queued = sum(job.missing for job in self._prefilling) + self._waiting_tokens
        return WorkerState(
            running=len(self._decoding) + len(self._prefilling),
            waiting=len(self._waiting),
            queued_prefill_tokens=queued - computed,
            decoding=len(self._decoding),
            free_blocks=self.cache.available - self._decoding.blocks_after(done),
        )

    def first_token_s(self, jobs: Sequence[Job], now_s: float) -> float:
        """When the last of `jobs` would have its first token if they came now, and nothing after. Changes nothing."""
        ahead = self._ahead(now_s)
        ahead.waiting.extend(_prompt(job, job.known_tokens) for job in jobs)
        for job in jobs:
            ahead.expect(job.block_ids[: job.coming])
        ahead.waiting[-1].is_wanted = True
        return ahead.first_token_s()

    def _ahead(self, now_s: float) -> Lookahead:
        """What is here, as of the end of the step that runs now."""
        segment = self._segment
        done = segment.steps_begun(now_s)
        computed = {job: tokens * done for job, tokens in segment.chunks}
        border = self._decoding.steps + done
        begins_s = segment.start_s + done * segment.step_s if done else now_s
        ahead = Lookahead(self.profile, self.cache, begins_s, self.cache.available)
        for job in self._decoding:
            if job.finish_at > border:
                ahead.finishing.append((job.finish_at - border, job.private + job.shared))
            else:
                ahead.free_blocks += job.private + job.shared
        for job in self._prefilling:
            prompt = _prompt(job, job.missing - computed.get(job, 0))
            prompt.registered, prompt.blocks = job.shared, job.private + job.shared
            ahead.register(prompt)
            if prompt.missing:
                ahead.prefilling.append(prompt)
            elif prompt.output_steps:
                ahead.finishing.append((prompt.output_steps, prompt.blocks))
            else:
                ahead.free_blocks += prompt.blocks
        ahead.waiting.extend(_prompt(job, job.known_tokens) for job in self._waiting)
        return ahead

    def lose(self, now_s: float) -> list[Job]:
        """The worker has died: its jobs, in order of arrival, with what each had drawn by now. It stays empty."""
        # What the last step draws has left nobody yet.
        self._decoding.steps += min(self._segment.steps_done(now_s), max(0, self._segment.steps - 1))
        for job in self._decoding:
            job.generated = self._decoding.drawn(job)
        jobs = sorted(self.jobs, key=lambda job: job.arrival)
        self.cache = BlockCache(self.profile.num_blocks)
        self._decoding = Decoding(self.cache, self.profile.block_tokens)
        for pool in (self._waiting, self._prefilling, self._expected):
            pool.clear()
        self._waiting_tokens, self._segment = 0, Segment()
        return jobs

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.profile.block_tokens)

    def _usable(self, job: Job) -> tuple[BlockId, ...]:
        """Blocks that need not be computed: the last known token always is."""
        return job.block_ids[: (job.known_tokens - 1) // self.profile.block_tokens]

    def _wait(self, job: Job, *, first: bool = False) -> None:
        hits = self.cache.match(self._usable(job))
        expected = job.known_tokens - hits * self.profile.block_tokens
        self._expected[job] = expected
        self._waiting_tokens += expected
        if first:
            self._waiting.appendleft(job)
        else:
            self._waiting.append(job)

    def _room(self) -> tuple[int, int, int]:
        """Places and blocks left once everything here that can run does, and the tokens of what cannot."""
        places = self.profile.max_running - len(self._decoding) - len(self._prefilling)
        blocks, queued = self.cache.available, 0
        for job in self._waiting:
            needed = self._blocks(self._expected[job])
            if places > 0 and needed <= blocks:
                places, blocks = places - 1, blocks - needed
            else:
                queued += self._expected[job]
        return places, blocks, queued

    def _plan(self, now_s: float) -> None:
        """Begin the next segment."""
        while self._decoding and self._decoding.room() < len(self._decoding):
            self._preempt()
        decoding, most = len(self._decoding), self.profile.step_token_budget
        budget = max(most - decoding, min(most, MIN_PREFILL_TOKENS))
        chunks = self._take_chunks(budget)
        prefill = sum(tokens for _, tokens in chunks)
        if not prefill and not decoding:
            self._segment = Segment()
            return
        # What has just started took blocks; the first step's growth is seen to by the reserve of `_start`.
        steps = max(1, self._decoding.room() // decoding) if decoding else math.inf
        if decoding:
            steps = min(steps, self._decoding.next_finish())
        if prefill:
            job, tokens = chunks[0]
            alone = len(chunks) == 1 and tokens == budget
            steps = min(steps, max(1, (job.missing - 1) // tokens) if alone else 1)
        self._segment = Segment(now_s, self.profile.time_model.step_s(prefill, decoding), int(steps), chunks)

    def _take_chunks(self, budget: int) -> list[tuple[Job, int]]:
        chunks: list[tuple[Job, int]] = []
        for job in self._prefilling:
            if not budget:
                return chunks
            chunks.append((job, min(job.missing, budget)))
            budget -= chunks[-1][1]
        while budget and self._waiting and len(self._decoding) + len(self._prefilling) < self.profile.max_running:
            if not self._start(self._waiting[0]):
                # Nobody overtakes a sequence that lacks blocks, or it might wait for ever.
                break
            job = self._waiting.popleft()
            chunks.append((job, min(job.missing, budget)))
            budget -= chunks[-1][1]
        return chunks

    def _start(self, job: Job) -> bool:
        """Take hits and blocks for all known tokens; False, and nothing taken, when blocks are missing."""
        usable = self._usable(job)
        hits = self.cache.match(usable)
        held = usable[:hits]
        needed = self._blocks(job.known_tokens) - hits
        running = len(self._decoding) + len(self._prefilling)
        # Running sequences need a block each before long: starting without a reserve would preempt at once.
        if needed + running > self.cache.available - self.cache.count_idle(held):
            return False
        self.cache.hold(held)
        self.cache.take(needed)
        job.shared, job.private = hits, needed
        job.missing = job.known_tokens - hits * self.profile.block_tokens
        job.hit_blocks = hits if job.hit_blocks < 0 else job.hit_blocks
        self._waiting_tokens -= self._expected.pop(job)
        self._prefilling[job] = None
        return True

    def _register(self, job: Job) -> bool:
        """What is computed of a prompt becomes reusable, block by block; whether there was any."""
        computed = (job.known_tokens - job.missing) // self.profile.block_tokens
        new = job.block_ids[job.shared : computed]
        self.cache.register(new)
        job.shared += len(new)
        job.private -= len(new)
        return bool(new)

    def _draw(self, job: Job, now_s: float, result: Advanced) -> None:
        """A prompt is computed: its next token comes with this step."""
        del self._prefilling[job]
        job.generated += 1
        if job.first_token_s < 0:
            job.first_token_s = now_s
            result.first_tokens.append(job)
        if job.generated >= job.output_tokens:
            result.finished.append(job)
            return
        self._decoding.add(job)

    def _free(self, job: Job) -> None:
        self.cache.release(job.block_ids[: job.shared])
        self.cache.give_back(job.private)
        job.shared = job.private = 0

    def _preempt(self) -> None:
        """The one that came last gives up its blocks and waits; it computes again what is not cached then."""
        self.preemptions += 1
        job = max((*self._decoding, *self._prefilling), key=lambda one: one.arrival)
        if job in self._decoding:
            self._decoding.stop(job)
        else:
            del self._prefilling[job]
        self._free(job)
        self._wait(job, first=True)


def _prompt(job: Job, missing: int) -> Prompt:
    return Prompt(job.known_tokens, missing, job.output_tokens - job.generated - 1, job.block_ids)
