"""What front, engine and mover of one worker say to each other: msgspec structs, tagged by type.

Token ids travel as little-endian u32 bytes, block ids concatenated (16 bytes each). A slot that the mover reads or
writes stays pinned by the engine until the message that ends the operation.
"""

from __future__ import annotations

import msgspec

from services.worker.link_messages import HolderLinks, RunTiming


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages."""


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """Fields and meaning of proto SamplingParams; num_logprobs None: none wanted."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    num_logprobs: int | None = None


class HolderRun(msgspec.Struct, frozen=True, array_like=True):
    """Part of a pull plan: `num_blocks` of the request's blocks from `first_block` on, at one holder.

    num_ssd_blocks: how many at its end are expected on the holder's SSD.
    """

    kind: str  # "worker" | "kvstore"
    location_id: str
    epoch: int
    pull_address: str
    grpc_address: str
    first_block: int
    num_blocks: int
    num_ssd_blocks: int = 0

    @property
    def holder(self) -> tuple[str, str]:
        """Kind and id of the location."""
        return self.kind, self.location_id


class Submit(Message, frozen=True):
    """Admit one attempt. `key` is unique for the life of the worker and names it in every later message.

    deadline_s: seconds left, from sending. Without block_root and prompt_block_ids nothing of it is cached.
    """

    key: int
    request_id: str
    prompt: bytes
    block_root: bytes
    prompt_block_ids: bytes
    owner_digest: bytes
    sampling: Sampling
    num_choices: int
    max_tokens: int
    stop_token_ids: list[int]
    pull_plan: list[HolderRun]
    priority: int
    expected_local_blocks: int
    deadline_s: float
    traceparent: str


class Abort(Message, frozen=True):
    """Release everything of `key` within one step. Unknown keys are ignored."""

    key: int


class Configure(Message, frozen=True):
    """The front's first message: the key of block ids, which must not be seen in a command line."""

    block_key: bytes


class DrainEngine(Message, frozen=True):
    """Admit nothing more."""


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


class EngineFailed(Message, frozen=True):
    """The engine cannot start or cannot go on; one line."""

    detail: str


class AdmittedRequest(Message, frozen=True):
    """`key` has its place in the scheduler."""

    key: int
    cached_tokens: int


class StaleRequest(Message, frozen=True):
    """`key` was not admitted: the queue is longer than the decision assumed."""

    key: int


class RequestFailed(Message, frozen=True):
    """Terminal message of `key`. `code` is a gRPC status name such as "INVALID_ARGUMENT"."""

    key: int
    code: str
    detail: str


class PositionLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of the chosen token and of the most likely ones, best first."""

    logprob: float
    top: list[tuple[int, float]]


class ChoiceOutput(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one choice, a stop token included; finish is "" (goes on), "stop" or "length"."""

    key: int
    choice: int
    token_ids: list[int]
    logprobs: list[PositionLogprob]
    finish: str


class RequestUsage(msgspec.Struct, frozen=True, array_like=True):
    """Final figures of a request; the cached ones are tokens by tier."""

    key: int
    prompt_tokens: int
    output_tokens: int
    cached_local: int
    cached_peer: int
    cached_ram: int
    cached_ssd: int
    queue_s: float
    pull_s: float
    prefill_s: float


class StepOutput(Message, frozen=True):
    """All that one step produced. `completed` is the terminal message of its requests."""

    choices: list[ChoiceOutput]
    completed: list[RequestUsage]


class RequestAborted(Message, frozen=True):
    """Figures of an aborted request whose prompt had been computed; no terminal message, its reader has gone.

    age_s: seconds since its arrival.
    """

    usage: RequestUsage
    age_s: float
    traceparent: str


class EngineLoad(Message, frozen=True):
    """Fields and meaning of proto WorkerLoad; sent every 100 ms and at admissions, finishes and ends of pulls.

    pushes_dropped: blocks not offered for want of room. pushes_deferred: times that a completed block had to wait for
    the turn of its ancestors at a new node. pulls_skipped: planned pulls that did not begin, by reason. pulls_cut:
    pulls given up for falling behind.
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
    holders: list[HolderLinks] = []
    pulls_skipped: dict[str, int] = {}
    pulls_cut: int = 0


class BlockChanges(Message, frozen=True):
    """Blocks that became reusable in the pool, in prefix order, and blocks that left it, descendants first."""

    adds: bytes
    removes: bytes


class PullBlocks(Message, frozen=True):
    """Fetch blocks `ids` into pool `slots` (same length, prefix order) from `runs`, whose indices are into `ids`.

    deadline_s: seconds that the pull may take, from sending. A pull that lags behind computing the same blocks, one
    every block_compute_s, by more than patience_s is cut: PullCut, and PullDone once its slots are free. 0: never.
    """

    key: int
    request_id: str
    ids: bytes
    slots: list[int]
    runs: list[HolderRun]
    deadline_s: float
    traceparent: str
    patience_s: float = 0.0
    block_compute_s: float = 0.0


class CancelPull(Message, frozen=True):
    """End a pull; PullDone still comes, and the slots stay the mover's until then."""

    key: int


class PushBlocks(Message, frozen=True):
    """Offer blocks in pool `slots` to the kvstore. `parents[i]` is the parent id of `ids[i]`. Never blocks anybody.

    starts_chain: ids[0] is the first block of a prompt, its parent a root. Otherwise the kvstore must hold the parent.
    """

    key: int
    ids: bytes
    parents: bytes
    slots: list[int]
    owner_digest: bytes
    traceparent: str
    starts_chain: bool = False


class PinnedSlots(Message, frozen=True):
    """Answer to PinBlocks: slots of the leading blocks that are here, pinned until Unpin of the same key."""

    key: int
    slots: list[int]


class PullCut(Message, frozen=True):
    """A pull is given up: the first `num_blocks` are verified in their slots and its request may go on.

    The other slots stay the mover's until PullDone, which repeats the count and brings no timings.
    """

    key: int
    num_blocks: int
    tiers: list[str]
    runs: list[RunTiming]


class PullDone(Message, frozen=True):
    """A pull has ended: the first `num_blocks` are verified in their slots, the rest untouched by now.

    tiers: of each arrived block, "peer", "ram" or "ssd". runs: of each run that was begun, in order.
    """

    key: int
    num_blocks: int
    tiers: list[str]
    error: str
    runs: list[RunTiming] = []


class PushDone(Message, frozen=True):
    """The slots of a push are free again. `accepted` counts leading blocks that the kvstore now holds.

    location_id, epoch: the node that was pushed to. refused: it answered that it would not keep the next block.
    """

    key: int
    accepted: int
    location_id: str = ""
    epoch: int = 0
    refused: bool = False


class PinBlocks(Message, frozen=True):
    """A remote puller wants `ids` (prefix order)."""

    key: int
    ids: bytes


class Unpin(Message, frozen=True):
    """The remote pull of `key` has ended."""

    key: int


class PushTarget(Message, frozen=True):
    """The kvstore node to push to; empty location_id: none is alive.

    To the mover, and to the engine, which pushes nothing without one and offers blocks anew to another.
    """

    location_id: str
    epoch: int
    pull_address: str
    grpc_address: str


class MoverReady(Message, frozen=True):
    """The pull endpoint listens; transport is "ucx" or "grpc"."""

    pull_address: str
    grpc_address: str
    transport: str


class NodeFailing(Message, frozen=True):
    """Pulls from or pushes to a kvstore node failed repeatedly; sent again while they do."""

    location_id: str
    epoch: int


class MoverCounters(Message, frozen=True):
    """Totals since start and, in the last three, what is under way; once a second."""

    pulled_blocks: int
    pulled_bytes: int
    failed_pulls: int
    verification_failures: int
    pushed_blocks: int
    dropped_pushes: int
    served_blocks: int
    bytes_by_transport: dict[str, int] = {}
    running_pulls: int = 0
    queued_pushes: int = 0
    open_leases: int = 0


FromFrontToEngine = Configure | Submit | Abort | DrainEngine | PushTarget
FromMoverToEngine = PullDone | PullCut | PushDone | PinBlocks | Unpin
FromEngineToFront = (
    EngineReady
    | EngineFailed
    | AdmittedRequest
    | StaleRequest
    | RequestFailed
    | RequestAborted
    | StepOutput
    | EngineLoad
    | BlockChanges
)
FromEngineToMover = PullBlocks | CancelPull | PushBlocks | PinnedSlots
FromMoverToFront = MoverReady | MoverCounters | NodeFailing
