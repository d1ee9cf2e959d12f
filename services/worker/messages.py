"""What front and engine of one worker say to each other of requests: msgspec structs, tagged by type.

Token ids travel as little-endian u32 bytes, block ids concatenated (16 bytes each). The rest of what they say:
`engine_messages`; what the mover says and is told: `mover_messages`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from services.worker.adapters.source import AdapterRef

MoveReason = Literal["draining", "short_of_blocks", "priority", "defragmentation"]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages."""


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """Fields and meaning of proto SamplingParams; num_logprobs, num_prompt_logprobs None: none wanted."""

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
    grammar: str = ""
    num_prompt_logprobs: int | None = None


class HolderRun(msgspec.Struct, frozen=True, array_like=True):
    """Part of a pull plan: `num_blocks` of the request's blocks from `first_block` on, at one holder.

    num_ssd_blocks: how many at its end are expected on the holder's SSD. wait_s: more than 0 where the holder is still
    computing them, so long may it wait for each next one.
    """

    kind: str  # "worker" | "kvstore"
    location_id: str
    epoch: int
    pull_address: str
    grpc_address: str
    first_block: int
    num_blocks: int
    num_ssd_blocks: int = 0
    wait_s: float = 0.0

    @property
    def holder(self) -> tuple[str, str, int]:
        """Kind, id and epoch of the location: one that has started anew is another holder."""
        return self.kind, self.location_id, self.epoch


class KnownOutput(msgspec.Struct, frozen=True, array_like=True):
    """Output of one choice that is known already. finished: nothing more is to be drawn of it."""

    choice: int
    token_ids: bytes
    finished: bool = False


class Submit(Message, frozen=True):
    """Admit one attempt. `key` is unique for the life of the worker and names it in every later message.

    deadline_s: seconds left, from sending. Without block_root and prompt_block_ids nothing of it is cached. hold_s:
    above 0 it computes what is known and draws nothing before its Resume, for which it waits so many seconds. embeds:
    nothing is drawn, and the pooled hidden state of the prompt is told.
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
    known: list[KnownOutput] = []
    hold_s: float = 0.0
    # None: the base model.
    adapter: AdapterRef | None = None
    embeds: bool = False


class Resume(Message, frozen=True):
    """Draw on after `further`: of a request with hold_s, which may draw already. Unknown keys are ignored.

    hold: not yet; it is prepared again once it has computed that, too.
    """

    key: int
    further: list[KnownOutput]
    hold: bool = False


class Abort(Message, frozen=True):
    """Release everything of `key` within one step. Unknown keys are ignored."""

    key: int


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


class PreparedRequest(Message, frozen=True):
    """The held request `key` has computed what it knows: after pull_s, and compute_s of waiting and computing."""

    key: int
    pull_s: float = 0.0
    compute_s: float = 0.0


class PromptAdvanced(Message, frozen=True):
    """Tokens that request `key` brought have been computed, and there is nothing else to say of it yet."""

    key: int


class MoveRequested(Message, frozen=True):
    """Request `key` would better go on elsewhere."""

    key: int
    reason: MoveReason


class PositionLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of the chosen token and of the most likely ones, best first.

    rank: of the chosen one, from 1 on; 0: not told.
    """

    logprob: float
    top: list[tuple[int, float]]
    rank: int = 0


class PromptScored(Message, frozen=True):
    """Log probabilities of the prompt's tokens from index `first` on, of which `token_ids` are the first."""

    key: int
    first: int
    token_ids: list[int]
    logprobs: list[PositionLogprob]


class PromptEmbedded(Message, frozen=True):
    """The pooled hidden state of a prompt, of length one: little-endian float32."""

    key: int
    values: bytes


class ChoiceOutput(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one choice, a stop token included; finish is "" (goes on), "stop" or "length".

    accelerator_s: the request's part of the time of steps so far. position: output tokens of the choice before these.
    """

    key: int
    choice: int
    token_ids: list[int]
    logprobs: list[PositionLogprob]
    finish: str
    accelerator_s: float = 0.0
    position: int = 0


class RequestUsage(msgspec.Struct, frozen=True, array_like=True):
    """Final figures of a request; the cached ones are tokens by tier.

    known_tokens: of the output, not drawn here. accelerator_s: its part of the time of steps.
    """

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
    known_tokens: int = 0
    accelerator_s: float = 0.0


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
