"""Requests and sequences: plain state of what is being served. Only the scheduler changes it.

A sequence is one choice of a request. It has tokens known (prompt and output) and tokens computed (KV in the pool);
each step brings the second up to the first, and a token is drawn when they meet. Preemption sets computed back to zero
and nothing else, so that a resumed sequence still knows which tokens are prompt and which are output.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from services.common.blocks import BLOCK_TOKENS, BlockId
from services.worker.drafting import Drafting
from services.worker.following import Follower
from services.worker.messages import HolderRun, Sampling

Int32Array = npt.NDArray[np.int32]


class Status(enum.Enum):
    """Where a sequence is. Only RUNNING sequences hold slots."""

    PULLING = enum.auto()
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class Known:
    """Output of a choice that another attempt has drawn. finished: nothing more is drawn of it."""

    tokens: Int32Array
    finished: bool


@dataclass(slots=True, eq=False)
class Request:
    """One attempt of a request, times in seconds of the caller's clock.

    prompt_ids: ids of the prompt's full blocks; empty together with block_root when nothing of it may be cached.
    """

    key: int
    request_id: str
    prompt: Int32Array
    block_root: BlockId
    prompt_ids: list[BlockId]
    owner_digest: bytes
    sampling: Sampling
    num_choices: int
    max_tokens: int
    stop_token_ids: frozenset[int]
    pull_plan: list[HolderRun]
    priority: int
    expected_local_blocks: int
    arrival_s: float
    deadline_s: float
    traceparent: str = ""
    # By choice; those that are not named begin with nothing.
    known: dict[int, Known] = field(default_factory=dict)
    sequences: list[Sequence] = field(default_factory=list)
    # Tier of the blocks that a pull brought, by block index.
    pulled_tiers: dict[int, str] = field(default_factory=dict)
    cached_tokens: dict[str, int] = field(default_factory=dict)
    # What its sequences wait for before they are enqueued.
    awaits_pull: bool = False
    awaits_grammar: bool = False
    awaits_adapter: bool = False
    # Where its adapter is; -1: the base model, or not there yet.
    adapter_slot: int = -1
    # The prompt has been computed; siblings of the leader hit its blocks from now on.
    prefilled: bool = False
    pull_s: float = 0.0
    first_step_s: float | None = None
    prefill_end_s: float = 0.0
    # Until when it waits to be resumed, drawing nothing; None: it is not held, or no more.
    held_until_s: float | None = None
    # It was held at first, and may be told what another attempt draws.
    was_held: bool = False
    # When its caller was last told that it gets on.
    told_s: float = 0.0
    # Whether its reader has been asked to move it, and whether another's has been for its sake.
    asked_to_move: bool = False
    wanted_room: bool = False
    # Of all choices, known ones included, and those alone.
    output_tokens: int = 0
    known_tokens: int = 0
    # Its part of the time of steps so far.
    accelerator_s: float = 0.0
    # Nothing is drawn: the hidden states of prompt tokens are pooled, here their sum, float64 [hidden size].
    embeds: bool = False
    pooled: npt.NDArray[np.float64] | None = None
    # Prompt tokens whose results are wanted for themselves (Chunk.read): from the first to the second.
    rows_read: int = 0
    rows_to_read: int = 0

    @property
    def wants_rows(self) -> bool:
        """Whether results of prompt tokens are still wanted for themselves."""
        return self.rows_read < self.rows_to_read

    @property
    def is_cacheable(self) -> bool:
        """Whether its blocks have ids."""
        return bool(self.block_root)

    @property
    def is_held(self) -> bool:
        """Whether nothing is drawn yet."""
        return self.held_until_s is not None

    @property
    def is_prepared(self) -> bool:
        """Whether its choices have computed all they may without drawing."""
        return all(
            s.status is Status.FINISHED or (s.status is Status.RUNNING and not s.num_due) for s in self.sequences
        )

    @property
    def leader(self) -> Sequence | None:
        """The first choice that has not ended: it is computed first, and the pull plan is of its blocks."""
        return next((s for s in self.sequences if s.status is not Status.FINISHED), None)

    @property
    def hit_ids(self) -> list[BlockId]:
        """Ids of the leader's blocks that are worth having."""
        leader = self.leader
        return [] if leader is None else leader.hit_ids

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended."""
        return all(sequence.status is Status.FINISHED for sequence in self.sequences)


class Sequence:
    """One choice. `tokens[:num_tokens]` are known, the KV of `tokens[:num_computed]` is in `slots`.

    What lies behind the known tokens means nothing but to a step in flight, which may have guesses there.
    """

    __slots__ = (
        "block_ids",
        "choice",
        "drafting",
        "follower",
        "num_computed",
        "num_registered",
        "num_tokens",
        "num_told",
        "order",
        "request",
        "slots",
        "status",
        "table",
        "tokens",
    )

    def __init__(self, request: Request, choice: int, order: int) -> None:
        prompt, known = request.prompt, request.known.get(choice)
        self.request = request
        self.choice = choice
        self.order = (request.priority, order, choice)
        self.tokens = np.empty(len(prompt) + request.max_tokens, dtype=np.int32)
        self.tokens[: len(prompt)] = prompt
        self.num_tokens = len(prompt)
        self.num_computed = 0
        self.num_registered = 0
        # Output tokens that it was told of, whether it had drawn them itself by then or not.
        self.num_told = 0
        self.block_ids = list(request.prompt_ids)
        self.slots: list[int] = []
        # `slots` as the runner wants them.
        self.table = np.full(blocks_for(len(self.tokens)), -1, dtype=np.int32)
        self.status = Status.WAITING
        # Of the request's grammar, from before anything is drawn.
        self.follower: Follower | None = None
        # From its first draft on.
        self.drafting: Drafting | None = None
        if known is not None:
            self.append(known)

    def append(self, known: Known) -> None:
        """Output that was drawn elsewhere goes on from what is known so far."""
        start, self.num_tokens = self.num_tokens, self.num_tokens + len(known.tokens)
        self.tokens[start : self.num_tokens] = known.tokens
        self.num_told += len(known.tokens)

    def unheard(self, known: Known) -> Known:
        """What it does not know of output that goes on from what it was told last, and counts as told now.

        It may have drawn some of it itself meanwhile.
        """
        num_drawn = self.num_output - self.num_told
        self.num_told += min(num_drawn, len(known.tokens))
        return Known(known.tokens[num_drawn:], known.finished)

    @property
    def hit_ids(self) -> list[BlockId]:
        """Ids of the blocks worth having: the last known token is always computed, for its logits.

        So is, by the leader, whatever of the prompt is to be read.
        """
        most = self.num_tokens - 1
        if self.request.wants_rows and self is self.request.leader:
            most = min(most, self.request.rows_read)
        return self.block_ids[: most // BLOCK_TOKENS]

    @property
    def num_prompt(self) -> int:
        """Prompt tokens."""
        return len(self.request.prompt)

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return self.num_tokens - len(self.request.prompt)

    @property
    def output(self) -> Int32Array:
        """Output tokens so far, a view."""
        return self.tokens[len(self.request.prompt) : self.num_tokens]

    @property
    def num_missing(self) -> int:
        """Tokens known and not computed; 1 while decoding."""
        return self.num_tokens - self.num_computed

    @property
    def num_due(self) -> int:
        """Tokens to compute now: while it is held all but the last known one, which a draw follows."""
        return self.num_missing - self.request.is_held

    @property
    def is_decoding(self) -> bool:
        """Whether its next step is one token and a draw."""
        request = self.request
        return self.num_tokens - self.num_computed == 1 and request.held_until_s is None and not request.embeds

    @property
    def is_catching_up(self) -> bool:
        """Whether it has computed all but a little output, which another worker has drawn meanwhile."""
        is_new = self.num_computed < self.num_prompt - 1
        return not is_new and self.num_missing > 1 and 0 < self.num_due <= BLOCK_TOKENS

    @property
    def has_slots(self) -> bool:
        """Whether every known token has a slot."""
        return len(self.slots) * BLOCK_TOKENS >= self.num_tokens

    def use_slots(self, slots: list[int]) -> None:
        """Append `slots` to the block table."""
        start = len(self.slots)
        self.slots += slots
        self.table[start : start + len(slots)] = slots

    def replace_slot(self, index: int, slot: int) -> None:
        """Use another slot, with the same content, for block `index`."""
        self.slots[index] = slot
        self.table[index] = slot

    def drop_slots(self) -> list[int]:
        """Forget the KV; returns the slots to release."""
        slots, self.slots = self.slots, []
        self.table[: len(slots)] = -1
        self.num_computed = self.num_registered = 0
        return slots
