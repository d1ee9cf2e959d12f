"""The sequences of a simulated worker that decode: when each ends, and the room that their tokens take. Pure.

The room of decoded tokens is counted for all sequences together, so blocks that are partly filled are counted once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from services.router.simulator.block_cache import BlockCache
from services.router.simulator.job import Job


class Decoding:
    """Takes the blocks of decoded tokens from `cache`. steps: decode steps so far."""

    def __init__(self, cache: BlockCache, block_tokens: int) -> None:
        self.steps = 0
        self._cache = cache
        self._block_tokens = block_tokens
        self._jobs: dict[Job, None] = {}
        # By the step at which each ends; what was preempted has an entry of before, too.
        self._finishing: list[tuple[int, int, Job]] = []
        # Tokens decoded by those that decode now, and the blocks they take.
        self._grown_tokens = 0
        self._grown_blocks = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def __contains__(self, job: object) -> bool:
        return job in self._jobs

    def add(self, job: Job) -> None:
        """`job` has drawn its first token, and draws one more with every step."""
        job.finish_at = self.steps + job.output_tokens - job.generated
        self._jobs[job] = None
        heapq.heappush(self._finishing, (job.finish_at, job.arrival, job))

    def advance(self, steps: int) -> list[Job]:
        """So many steps have run; returns those that have ended, without taking their prompts' blocks from them."""
        self.steps += steps
        self._grow(len(self._jobs) * steps)
        finished: list[Job] = []
        while self._finishing and self._finishing[0][0] <= self.steps:
            finish_at, _, job = heapq.heappop(self._finishing)
            if self._is_current(job, finish_at):
                self.stop(job)
                finished.append(job)
        return finished

    def stop(self, job: Job) -> None:
        """It decodes no more; its decoded tokens are its own until it is freed."""
        drawn = self.drawn(job)
        self._grow(job.generated - drawn)
        job.generated = drawn
        del self._jobs[job]

    def drawn(self, job: Job) -> int:
        """Tokens of one of them by now."""
        return job.output_tokens - (job.finish_at - self.steps)

    def next_finish(self) -> int:
        """Steps until the first one ends; there is one."""
        while True:
            finish_at, _, job = self._finishing[0]
            if self._is_current(job, finish_at):
                return finish_at - self.steps
            heapq.heappop(self._finishing)

    def room(self) -> int:
        """Tokens that can be decoded before blocks run out."""
        return (self._grown_blocks + self._cache.available) * self._block_tokens - self._grown_tokens

    def blocks_after(self, steps: int) -> int:
        """Blocks that so many more steps would take."""
        return self._blocks(self._grown_tokens + steps * len(self._jobs)) - self._grown_blocks

    def _is_current(self, job: Job, finish_at: int) -> bool:
        return job in self._jobs and job.finish_at == finish_at

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def _grow(self, tokens: int) -> None:
        self._grown_tokens += tokens
        blocks = self._blocks(self._grown_tokens)
        if blocks > self._grown_blocks:
            self._cache.take(blocks - self._grown_blocks)
        else:
            self._cache.give_back(self._grown_blocks - blocks)
        self._grown_blocks = blocks
