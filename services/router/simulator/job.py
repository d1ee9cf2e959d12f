"""The plain data of a simulated worker: what it can do, what it is given, what it says."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from services.common.blocks import BlockId
from services.common.time_model import TimeModel

# However many decode, a step computes at least this many prompt tokens, as in the real scheduler.
MIN_PREFILL_TOKENS = 32


@dataclass(frozen=True, slots=True)
class WorkerProfile:
    """What one worker can do."""

    time_model: TimeModel
    cached_tokens: int
    block_tokens: int
    step_token_budget: int
    max_running: int
    # Prefill time that may wait beyond what can run at once; more is answered STALE.
    max_queue_s: float

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self.cached_tokens // self.block_tokens


@dataclass(slots=True, eq=False)
class Job:
    """One attempt of a request on a worker.

    prompt_tokens: to be known before the first token that is still to come; output_tokens: to be drawn here.
    generated: drawn so far. coming: leading blocks that a pull is to bring. hit_blocks: found in the cache at the
    start, -1 before.
    """

    key: Hashable
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[BlockId, ...]
    arrival: int = 0
    generated: int = 0
    missing: int = 0
    coming: int = 0
    hit_blocks: int = -1
    first_token_s: float = -1.0
    shared: int = 0
    private: int = 0
    # The worker's count of decode steps at which the last token comes; 0 while it does not decode.
    finish_at: int = 0

    @property
    def known_tokens(self) -> int:
        """Prompt and answer so far."""
        return self.prompt_tokens + self.generated


@dataclass(slots=True)
class Advanced:
    """What a segment brought about; computed: of prompts how many of their leading blocks are reusable now."""

    first_tokens: list[Job] = field(default_factory=list)
    finished: list[Job] = field(default_factory=list)
    computed: list[tuple[Job, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What a worker reports of itself at one moment."""

    running: int
    waiting: int
    queued_prefill_tokens: int
    decoding: int
    free_blocks: int
