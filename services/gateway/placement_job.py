"""One prompt ready to be placed, and the messages that are made of it for the line, the router and a worker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmesh.v1.common_pb2 import Objectives, SamplingParams
from kvmesh.v1.router_pb2 import Ask, Grant, Requirements
from kvmesh.v1.worker_pb2 import KnownOutput, WorkerGenerateRequest

from services.common.blocks import BLOCK_ID_BYTES, BlockId, chain_block_ids, join_ids
from services.common.fair_queue import RequestClass
from services.common.release import ADAPTER_PROTOCOL, GRAMMAR_PROTOCOL, SCORE_PROTOCOL
from services.gateway.adapters import AdapterView
from services.gateway.output_record import OutputRecord
from services.gateway.request import PromptPlan
from services.gateway.tickets import Wanted

# An objective that is missed already, in the terms of an Ask, where 0 means none.
_LEAST_OBJECTIVE_S = 0.001


class Keeper(Protocol):
    """Who has the workers keep a prompt's attempts."""

    @property
    def keep_s(self) -> float:
        """Seconds without a reader after which a worker forgets them."""

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody will come back for them."""

    def placed(self, grant: Grant, attempt: int, *, is_resumed: bool) -> None:
        """A worker has it from now on. is_resumed: it has begun with output that is known."""


@dataclass(slots=True)
class PlacementJob:
    """What does not change from one attempt to the next, but for accelerator_s.

    block_key, block_root, block_tokens: of the ids of blocks, whose chain goes on through the output. deadline_at_s,
    ttft_at_s: monotonic; the latter when the first token is due, inf for no such objective. tpot_s: 0 for no objective.
    keeper: None for attempts that end with their caller. accelerator_s: of the attempts that have ended.
    """

    request_id: str
    tenant: str
    model: str
    model_digest: bytes
    prompt: PromptPlan
    block_key: bytes
    block_root: bytes
    block_tokens: int
    owner_digest: bytes
    sampling: SamplingParams
    num_choices: int
    stop_token_ids: tuple[int, ...]
    request_class: RequestClass
    deadline_at_s: float
    ttft_at_s: float
    tpot_s: float
    traceparent: str
    adapter: AdapterView | None = None
    keeper: Keeper | None = None
    accelerator_s: float = 0.0
    embeds: bool = False
    pooling: str = ""

    def wanted(self, *, is_accepted: bool) -> Wanted:
        """What the fair line has to know. is_accepted: a worker had taken it, so no objective ends its wait."""
        return Wanted(
            model=self.model,
            tenant=self.tenant,
            request_class=self.request_class,
            prompt_tokens=self.prompt.num_tokens,
            max_tokens=self.prompt.max_tokens,
            num_choices=self.num_choices,
            deadline_at_s=self.deadline_at_s,
            ttft_at_s=math.inf if is_accepted else self.ttft_at_s,
        )

    @property
    def protocol(self) -> int:
        """Least WorkerIdentity.protocol of whoever may run it; 0: any."""
        if self.reads_prompt:
            return SCORE_PROTOCOL
        if self.adapter is not None:
            return ADAPTER_PROTOCOL
        return GRAMMAR_PROTOCOL if self.sampling.grammar else 0

    @property
    def reads_prompt(self) -> bool:
        """Whether something of the prompt itself is wanted: one worker computes all of it then."""
        return self.embeds or self.sampling.HasField("num_prompt_logprobs")

    @property
    def requirements(self) -> Requirements | None:
        """What the worker must have beyond the model; None: nothing."""
        if not self.protocol:
            return None
        requires = Requirements(protocol=self.protocol, pooling=self.pooling)
        if self.adapter is not None:
            requires.adapter_digest, requires.adapter_rank = self.adapter.digest, self.adapter.rank
        return requires

    def objectives_left(self, now_s: float) -> Objectives:
        """What is left of the objectives. now_s: monotonic time."""
        left_s = max(_LEAST_OBJECTIVE_S, self.ttft_at_s - now_s)
        return Objectives(ttft_s=left_s if math.isfinite(left_s) else 0.0, tpot_s=self.tpot_s)

    def ask(self, attempt: int, excluded: Sequence[str], asks_as: RequestClass, objectives: Objectives | None) -> Ask:
        """The question to the router. asks_as: the class that this turn counts as."""
        return Ask(
            request_id=self.request_id,
            attempt=attempt,
            model=self.model,
            block_ids=b"" if self.reads_prompt else self.prompt.block_ids,
            model_digest=self.model_digest,
            prompt_tokens=self.prompt.num_tokens,
            max_output_tokens=self.prompt.max_tokens * self.num_choices,
            num_choices=self.num_choices,
            priority=asks_as.value,  # type: ignore[arg-type]
            tenant=self.tenant,
            excluded_workers=excluded,
            traceparent=self.traceparent,
            objectives=objectives,
            requires=self.requirements,
            can_hand_off=not self.reads_prompt,
            knows_too_large=True,
        )

    def ask_again(self, attempt: int, excluded: Sequence[str], asks_as: RequestClass, output: OutputRecord) -> Ask:
        """The same for a prompt that a worker has admitted before and that goes on from `output`."""
        known = output.first_open()
        ask = self.ask(attempt, excluded, asks_as, None)
        ask.resumes = True
        if known:
            ask.block_ids = self._block_ids_with(known)
        ask.prompt_tokens = self.prompt.num_tokens + len(known)
        ask.num_choices, ask.further_tokens = max(1, output.num_open), output.further_tokens()
        # A choice that lacks its finish alone still needs a place for one token.
        ask.max_output_tokens = max(1, self.prompt.max_tokens - len(known)) * ask.num_choices
        return ask

    def worker_request(
        self, attempt: int, grant: Grant, known: Sequence[KnownOutput], hold_s: float = 0.0
    ) -> WorkerGenerateRequest:
        """The assignment to the granted worker. known, hold_s: as in the message."""
        request = WorkerGenerateRequest.FromString(self.prompt.message)
        rest = WorkerGenerateRequest(
            request_id=self.request_id,
            attempt=attempt,
            model_digest=self.model_digest,
            block_root=self.block_root,
            owner_digest=self.owner_digest,
            sampling=self.sampling,
            num_choices=self.num_choices,
            max_tokens=self.prompt.max_tokens,
            stop_token_ids=self.stop_token_ids,
            pull_plan=grant.pull_plan,
            priority=self.request_class.value,  # type: ignore[arg-type]
            expected_local_blocks=grant.local_blocks,
            known=known,
            hold_s=hold_s,
            keep_s=self.keeper.keep_s if self.keeper is not None else 0.0,
            embeds=self.embeds,
        )
        if self.adapter is not None:
            rest.adapter.digest, rest.adapter.path = self.adapter.digest, self.adapter.path
        request.MergeFrom(rest)
        return request

    def _block_ids_with(self, output: Sequence[int]) -> bytes:
        """Ids of the full blocks of the prompt and of what follows it."""
        ids = self.prompt.block_ids
        num_blocks = len(ids) // BLOCK_ID_BYTES
        prompt = WorkerGenerateRequest.FromString(self.prompt.message).prompt_token_ids
        parent = BlockId(ids[-BLOCK_ID_BYTES:] if num_blocks else self.block_root)
        rest = [*prompt[num_blocks * self.block_tokens :], *output]
        return ids + join_ids(chain_block_ids(self.block_key, parent, rest, self.block_tokens))
