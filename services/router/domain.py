"""Plain data of the router: what is asked, what workers say of themselves, what is answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NewType

import numpy as np
import numpy.typing as npt

from services.common.blocks import BlockId
from services.common.keys import life_key
from services.common.release import FIRST_PROTOCOL
from services.common.step_costs import StepCosts

WorkerId = NewType("WorkerId", str)


@dataclass(frozen=True, slots=True)
class AttemptId:
    """One assignment of a request."""

    request_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}"

    @property
    def handoff(self) -> AttemptId:
        """The second part of a request whose first part this is."""
        return AttemptId(self.request_id, self.attempt + 1)


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a worker must have beyond the model: empty fields ask for nothing.

    adapter: digest of one that it can load, of that rank; who has it loaded is better.
    """

    dtype: str = ""
    device: str = ""
    adapter: bytes = b""
    adapter_rank: int = 0
    protocol: int = 0
    pooling: str = ""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that wants a worker; block_ids are those of the prompt's full blocks.

    priority: a PriorityClass, 1 the most urgent, 0 unset. ttft_objective_s, tpot_objective_s: what is left of each, 0
    for none. resumes: it was accepted before, and is refused for no objective, its own or others'.
    """

    id: AttemptId
    model: str
    model_digest: bytes
    block_ids: list[BlockId]
    prompt_tokens: int
    max_output_tokens: int
    num_choices: int = 1
    deadline_s: float = 0.0
    excluded_workers: frozenset[str] = frozenset()
    policy: str = ""
    priority: int = 0
    ttft_objective_s: float = 0.0
    tpot_objective_s: float = 0.0
    requires: Requirements = Requirements()
    resumes: bool = False
    # The gateway knows what to do with a placement that has a handoff.
    can_hand_off: bool = False
    # Only workers that can start it at once: it is to relieve the one that has it.
    needs_room_now: bool = False
    # The gateway tells a request that no worker has room for from one without a worker.
    knows_too_large: bool = False
    # Output of open choices beside the one in prompt_tokens, which have blocks of their own.
    further_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Identity:
    """What does not change while a worker runs; rates are its self-benchmark's."""

    worker_id: WorkerId
    epoch: int
    model: str
    model_digest: bytes
    context_length: int
    dtype: str
    kv_dtype: str
    weight_format: str
    block_tokens: int
    layout_version: int
    vocab_size: int
    tokenizer_digest: bytes
    total_blocks: int
    block_bytes: int
    prefill_tokens_per_s: float
    decode_step_s: float
    step_token_budget: int
    max_running_requests: int
    # "both", "prefill" or "decode"; "cpu" or "cuda", empty: not told.
    role: str = "both"
    device: str = ""
    protocol: int = FIRST_PROTOCOL
    # Adapters that can be resident at once, and their highest rank.
    adapter_slots: int = 0
    max_adapter_rank: int = 0
    # "none", "mean" or "last"; empty: not told.
    pooling: str = ""


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """What a worker's pulls have taught of one tier of one holder; freshness falls from 1 to 0 without new ones."""

    bytes_per_s: float
    setup_s: float
    freshness: float = 1.0


@dataclass(frozen=True, slots=True)
class HolderLinks:
    """A worker's links to one holder, None where unmeasured, and what it is pulling from there.

    holder: name of the location with its epoch: one that has started anew is another holder.
    """

    holder: str
    memory: MeasuredLink | None = None
    ssd: MeasuredLink | None = None
    in_flight_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """One report of a worker; rates are 0, and step_costs None, where it has measured none.

    queued_prefill_pairs: for each queued prompt token the tokens before it, summed. waiting_prefill_tokens: of the
    queued tokens those that no step has begun, by class from the most urgent on. context_tokens: of the decoding
    sequences. step_tokens: most of a step at present, 0 for what the identity says.
    """

    progress: int
    ready: bool
    draining: bool
    running_requests: int
    waiting_requests: int
    queued_prefill_tokens: int
    decoding_sequences: int
    free_blocks: int
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    queued_prefill_pairs: float = 0.0
    waiting_prefill_tokens: tuple[int, ...] = ()
    context_tokens: int = 0
    step_tokens: int = 0
    step_costs: StepCosts | None = None
    cached_blocks: int = 0
    admitted: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    holders: tuple[HolderLinks, ...] = ()
    # Digests of the resident adapters, places that another could have now, and the seconds of loading one.
    adapters: frozenset[bytes] = frozenset()
    idle_adapter_slots: int = 0
    adapter_load_s: float = 0.0


class RefusalReason(Enum):
    """Why no worker was granted."""

    BAD_ASK = "bad_ask"
    NO_WORKER = "no_worker"
    OVERLOADED = "overloaded"
    UNKNOWN_MODEL = "unknown_model"
    DEADLINE = "deadline"
    TOO_LARGE = "too_large"


@dataclass(frozen=True, slots=True)
class Refused:
    """The answer when there is no grant.

    retry_after_s: for the caller, should it be refused. room_in_s: when a worker is expected to take it, for who waits.
    """

    reason: RefusalReason
    detail: str
    retry_after_s: float
    room_in_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PullRun:
    """Blocks [first_block, first_block + num_blocks) of the prompt, from one holder; the last num_ssd_blocks of them
    are on its SSD. wait_s: more than 0 where the holder is about to compute them, see PullStep.
    """

    kind: str
    location_id: str
    epoch: int
    pull_address: str
    grpc_address: str
    first_block: int
    num_blocks: int
    num_ssd_blocks: int = 0
    wait_s: float = 0.0

    @property
    def holder(self) -> str:
        """The holder's name, epoch included."""
        return life_key(self.kind, self.location_id, self.epoch)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why: of each candidate its score (the lowest won), and the terms it is made of where they are asked for."""

    candidates: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]
    # The terms by name, of all candidates or of those at some places, in the order of these.
    terms_of: Callable[[slice | npt.NDArray[np.int64]], dict[str, npt.NDArray[np.float64]]]
    chosen: int

    @property
    def terms(self) -> dict[str, npt.NDArray[np.float64]]:
        """Of all candidates."""
        return self.terms_of(slice(None))


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a decision expected of its attempt, to be learned from at its end.

    features: the parts of the time to the first token, see `policies.correction`. pace: the worker's factor then.
    """

    features: tuple[float, ...]
    pace: float
    ttft_s: float
    tpot_s: float
    uncorrected_ttft_s: float
    uncorrected_tpot_s: float
    queue_s: float


@dataclass(frozen=True, slots=True)
class Placement:
    """The answer when there is a grant.

    prefill_tokens, prefill_pairs, num_blocks: what the decision assumes that the worker will compute, and take from
    its pool. work_s: the time that this takes it, with the output's part of its steps; prefill_s: without.
    pulled_bytes: what it will pull, by holder. handoff: the second part of a request whose first part this is; its
    predicted_ttft_s is when it will be prepared.
    """

    worker_id: WorkerId
    worker_epoch: int
    worker_address: str
    pull_plan: list[PullRun]
    local_blocks: int
    predicted_ttft_s: float
    predicted_tpot_s: float
    prefill_tokens: int
    num_blocks: int
    pulled_bytes: tuple[tuple[str, float], ...]
    policy: str
    explanation: Explanation
    prediction: Prediction
    prefill_pairs: float = 0.0
    work_s: float = 0.0
    prefill_s: float = 0.0
    block_bytes: int = 0
    handoff: Placement | None = None
