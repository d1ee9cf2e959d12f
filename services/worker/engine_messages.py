"""What the engine of one worker is told and says beside its requests: how it begins, its load, its blocks.

At the end the unions of all that it is told and says. Block ids are concatenated, 16 bytes each.
"""

from __future__ import annotations

import msgspec

from services.common.step_costs import StepCosts
from services.worker.adapters.source import AdapterFigures
from services.worker.link_messages import HolderLinks
from services.worker.messages import (
    Abort,
    AdmittedRequest,
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


class Configure(Message, frozen=True):
    """The front's first message: the key of block ids, which must not be seen in a command line."""

    block_key: bytes


class DrainEngine(Message, frozen=True):
    """Admit nothing more."""


class PushTarget(Message, frozen=True):
    """The kvstore node to push to; empty location_id: none is alive.

    To the mover, and to the engine, which pushes nothing without one and offers blocks anew to another.
    """

    location_id: str
    epoch: int
    pull_address: str
    grpc_address: str


class LoadProgress(Message, frozen=True):
    """Bytes of weights that the engine has read, and all of them; sent while it loads."""

    done_bytes: int
    total_bytes: int


class MemoryFigures(msgspec.Struct, frozen=True, array_like=True):
    """The figures of model/memory.py's MemoryMap, derived ones included."""

    device: str
    total_bytes: int
    weight_bytes: int
    reserve_bytes: int
    kv_bytes: int
    block_bytes: int
    num_blocks: int
    kv_tokens: int
    staging_bytes: int
    adapter_bytes: int
    max_context: int
    largest_context: int
    unused_bytes: int


class EngineReady(Message, frozen=True):
    """The model is loaded and has produced a token through the model path. Rates are the self-benchmark's."""

    model_digest: bytes
    dtype: str
    kv_dtype: str
    weight_format: str
    vocab_size: int
    context_length: int
    num_blocks: int
    block_bytes: int
    prefill_tokens_per_s: float
    decode_step_s: float
    # [kv_head, layer, k|v, token, head_dim]
    block_shape: list[int]
    # Of the memory that the mover sees: num_blocks where that is the pool itself.
    transfer_slots: int
    memory: MemoryFigures
    # Adapters that can be resident, and their highest rank; 0 where there are none.
    adapter_slots: int = 0
    max_adapter_rank: int = 0


class EngineFailed(Message, frozen=True):
    """The engine cannot start or cannot go on; one line. kind: the name of the exception."""

    detail: str
    kind: str = ""


class RankReady(Message, frozen=True):
    """A rank other than 0 has its part of the model."""


class RankAlive(Message, frozen=True):
    """A rank other than 0 is between two steps."""


class EngineLoad(Message, frozen=True):
    """Fields and meaning of proto WorkerLoad; sent at admissions, finishes, ends of pulls and at least every 200 ms.

    pushes_dropped: blocks that left the pool before the node was given them. pushes_deferred: times that a completed
    block had to wait for the turn of its ancestors at a new node. pulls_skipped: planned pulls that did not begin, by
    reason. pulls_cut: pulls given up for falling behind. staging_waits, staging_short_blocks: transfers that waited for
    room in staging and blocks that were not transferred for want of it, by use. held_requests: that wait to be resumed.
    pins: pulls by others that hold blocks here or wait for them. drafted_tokens, accepted_tokens: guesses at tokens,
    and those of them that held.
    """

    progress: int
    running_requests: int
    waiting_requests: int
    queued_prefill_tokens: int
    decoding_sequences: int
    free_blocks: int
    cached_blocks: int
    referenced_blocks: int
    prefill_tokens_per_s: float
    decode_step_s: float
    preemptions: int
    pushes_dropped: int
    pushes_deferred: int = 0
    queued_prefill_pairs: float = 0.0
    waiting_prefill_tokens: tuple[int, ...] = ()
    context_tokens: int = 0
    step_tokens: int = 0
    step_costs: StepCosts | None = None
    holders: list[HolderLinks] = msgspec.field(default_factory=list)
    pulls_skipped: dict[str, int] = msgspec.field(default_factory=dict)
    pulls_cut: int = 0
    staging_waits: dict[str, int] = msgspec.field(default_factory=dict)
    staging_short_blocks: dict[str, int] = msgspec.field(default_factory=dict)
    held_requests: int = 0
    pins: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    # None: the engine has no adapters.
    adapters: AdapterFigures | None = None


class BlockChanges(Message, frozen=True):
    """Blocks that became reusable in the pool, in prefix order, and blocks that left it, descendants first."""

    adds: bytes
    removes: bytes


FromFrontToEngine = Configure | Submit | Resume | Abort | DrainEngine | PushTarget
FromRankToFront = RankReady | RankAlive | EngineFailed
FromEngineToFront = (
    EngineReady
    | EngineFailed
    | LoadProgress
    | AdmittedRequest
    | StaleRequest
    | RequestFailed
    | RequestAborted
    | PreparedRequest
    | MoveRequested
    | PromptAdvanced
    | PromptEmbedded
    | PromptScored
    | StepOutput
    | EngineLoad
    | BlockChanges
)
