"""When a worker would draw a request's first token if nothing else came: what only a simulation can know. Pure.

The steps are those of `SimWorker`, with counts in the place of blocks: what a finished request held is free at once,
and nothing is preempted. So the answer is exact while blocks suffice and close to it otherwise.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from services.common.blocks import BlockId
from services.router.simulator.job import MIN_PREFILL_TOKENS, WorkerProfile


@dataclass(slots=True)
class Prompt:
    """Still to be computed: `missing` of `tokens`. output_steps: decode steps that follow. blocks: held, once started.

    ids: of its full blocks; registered: how many of them are reusable.
    """

    tokens: int
    missing: int
    output_steps: int
    ids: Sequence[BlockId]
    registered: int = 0
    blocks: int = 0
    is_wanted: bool = False


@dataclass(slots=True)
class Lookahead:
    """A worker's work from a step's border on, at `now_s`; `first_token_s` uses it up.

    cached: blocks that are there. finishing: of each decoding sequence the steps left and the blocks it will free.
    """

    profile: WorkerProfile
    cached: Container[BlockId]
    now_s: float
    free_blocks: int
    prefilling: deque[Prompt] = field(default_factory=deque)
    waiting: deque[Prompt] = field(default_factory=deque)
    finishing: list[tuple[int, int]] = field(default_factory=list)
    _computed: set[BlockId] = field(default_factory=set)
    _steps: int = 0

    def expect(self, ids: Sequence[BlockId]) -> None:
        """These blocks are brought here before their prompt's turn comes."""
        self._computed.update(ids)

    def first_token_s(self) -> float:
        """When the wanted prompt, which is the last, has been computed."""
        heapq.heapify(self.finishing)
        while not self._take():
            pass
        return self.now_s

    def _take(self) -> bool:
        """The next steps of one composition; whether the wanted prompt is done."""
        decoding, most = len(self.finishing), self.profile.step_token_budget
        budget = max(most - decoding, min(most, MIN_PREFILL_TOKENS))
        self._start(budget)
        if self.prefilling and self.prefilling[0].missing > budget:
            self._take_whole(self.prefilling[0], budget, decoding)
            return False
        reached, left = [], budget
        while left and self.prefilling:
            first = self.prefilling[0]
            tokens = min(left, first.missing)
            first.missing -= tokens
            left -= tokens
            reached.append(first)
            if first.missing:
                break
            self.prefilling.popleft()
        self._pass(1 if reached else self.finishing[0][0] - self._steps, budget - left, decoding)
        for prompt in reached:
            self.register(prompt)
            if not prompt.missing:
                self._decode(prompt)
        return any(prompt.is_wanted and not prompt.missing for prompt in reached)

    def _take_whole(self, first: Prompt, budget: int, decoding: int) -> None:
        """Steps that one prompt fills."""
        steps = (first.missing - 1) // budget
        if decoding:
            steps = min(steps, self.finishing[0][0] - self._steps)
        first.missing -= steps * budget
        self._pass(steps, budget, decoding)
        self.register(first)

    def _start(self, budget: int) -> None:
        """Waiting prompts that the next step reaches take their blocks."""
        reach = sum(prompt.missing for prompt in self.prefilling)
        while self.waiting and reach < budget:
            running, first = len(self.finishing) + len(self.prefilling), self.waiting[0]
            hits = self._hits(first)
            blocks = -(-first.tokens // self.profile.block_tokens) - hits
            if running and (running >= self.profile.max_running or blocks + running > self.free_blocks):
                return
            self.free_blocks -= blocks
            first.blocks, first.registered = blocks, hits
            first.missing = first.tokens - hits * self.profile.block_tokens
            reach += first.missing
            self.prefilling.append(self.waiting.popleft())

    def _hits(self, prompt: Prompt) -> int:
        usable = prompt.ids[: (prompt.tokens - 1) // self.profile.block_tokens]
        present = (id_ in self._computed or id_ in self.cached for id_ in usable)
        return next((at for at, is_there in enumerate(present) if not is_there), len(usable))

    def register(self, prompt: Prompt) -> None:
        """What is computed of it is there for others."""
        computed = (prompt.tokens - prompt.missing) // self.profile.block_tokens
        self._computed.update(prompt.ids[prompt.registered : computed])
        prompt.registered = max(prompt.registered, computed)

    def _decode(self, prompt: Prompt) -> None:
        if prompt.output_steps:
            heapq.heappush(self.finishing, (self._steps + prompt.output_steps, prompt.blocks))
        else:
            self.free_blocks += prompt.blocks

    def _pass(self, steps: int, prefill: int, decoding: int) -> None:
        self.now_s += steps * self.profile.time_model.step_s(prefill, decoding)
        self._steps += steps
        while self.finishing and self.finishing[0][0] <= self._steps:
            self.free_blocks += heapq.heappop(self.finishing)[1]
