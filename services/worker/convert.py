"""Between the Worker protocol and the messages to the engine. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

import numpy as np
from kvmesh.v1 import common_pb2, worker_pb2

from services.worker.adapters.source import AdapterRef
from services.worker.engine_messages import EngineLoad
from services.worker.link_messages import HolderLinks, MeasuredLink
from services.worker.load_board import LoadBoard
from services.worker.messages import (
    ChoiceOutput,
    HolderRun,
    KnownOutput,
    MoveRequested,
    PositionLogprob,
    PromptScored,
    RequestUsage,
    Sampling,
    Submit,
)

_KINDS = {common_pb2.LOCATION_KIND_WORKER: "worker", common_pb2.LOCATION_KIND_KVSTORE: "kvstore"}
_KIND_NUMBERS = {name: number for number, name in _KINDS.items()}
_MOVE_REASONS = {
    "draining": worker_pb2.MOVE_REASON_DRAINING,
    "short_of_blocks": worker_pb2.MOVE_REASON_SHORT_OF_BLOCKS,
    "priority": worker_pb2.MOVE_REASON_PRIORITY,
    "defragmentation": worker_pb2.MOVE_REASON_DEFRAGMENTATION,
}
# Told of those that are resident: the most recently used.
_MAX_ADAPTERS = 256
_FINISH = {"stop": common_pb2.FINISH_REASON_STOP, "length": common_pb2.FINISH_REASON_LENGTH}


def submit_message(
    request: worker_pb2.WorkerGenerateRequest, *, key: int, deadline_s: float, traceparent: str
) -> Submit:
    """The engine's message of a request. Runs of unknown kinds end the pull plan."""
    return Submit(
        key=key,
        request_id=request.request_id,
        prompt=np.array(request.prompt_token_ids, dtype="<u4").tobytes(),
        block_root=request.block_root,
        prompt_block_ids=request.prompt_block_ids,
        owner_digest=request.owner_digest,
        sampling=_sampling(request.sampling),
        num_choices=request.num_choices or 1,
        max_tokens=request.max_tokens,
        stop_token_ids=list(request.stop_token_ids),
        pull_plan=_pull_plan(request.pull_plan),
        priority=request.priority or common_pb2.PRIORITY_CLASS_STANDARD,
        expected_local_blocks=request.expected_local_blocks,
        deadline_s=deadline_s,
        traceparent=traceparent,
        known=known_outputs(request.known),
        hold_s=request.hold_s,
        adapter=AdapterRef(request.adapter.digest, request.adapter.path) if request.HasField("adapter") else None,
        embeds=request.embeds,
    )


def known_outputs(known: Iterable[worker_pb2.KnownOutput]) -> list[KnownOutput]:
    """What is known of choices, for the engine."""
    return [KnownOutput(one.choice, np.array(one.token_ids, dtype="<u4").tobytes(), one.finished) for one in known]


def chunk_proto(outputs: Sequence[ChoiceOutput]) -> worker_pb2.WorkerGenerateResponse:
    """The tokens of consecutive outputs of one choice."""
    chunk = worker_pb2.TokenChunk(choice=outputs[0].choice, position=outputs[0].position)
    for output in outputs:
        chunk.token_ids.extend(output.token_ids)
        for token, logprob in zip(output.token_ids, output.logprobs, strict=False):
            _add_logprob(chunk.logprobs.add(), token, logprob)
    chunk.accelerator_s = outputs[-1].accelerator_s
    return worker_pb2.WorkerGenerateResponse(tokens=chunk)


def scores_proto(scored: PromptScored) -> worker_pb2.WorkerGenerateResponse:
    """Log probabilities of a prompt's tokens."""
    told = common_pb2.PromptLogprobs(first=scored.first)
    for token, logprob in zip(scored.token_ids, scored.logprobs, strict=True):
        _add_logprob(told.logprobs.add(), token, logprob)
    return worker_pb2.WorkerGenerateResponse(prompt_logprobs=told)


def finish_proto(output: ChoiceOutput) -> worker_pb2.WorkerGenerateResponse:
    """The end of a choice."""
    finish = worker_pb2.WorkerChoiceFinish(choice=output.choice, reason=_FINISH[output.finish])
    return worker_pb2.WorkerGenerateResponse(finish=finish)


def move_proto(wish: MoveRequested) -> worker_pb2.WorkerGenerateResponse:
    """The wish that a request goes on elsewhere."""
    return worker_pb2.WorkerGenerateResponse(move_wanted=worker_pb2.MoveWanted(reason=_MOVE_REASONS[wish.reason]))


def completed_proto(usage: RequestUsage) -> worker_pb2.WorkerGenerateResponse:
    """The end of a request."""
    cached = common_pb2.CachedTokens(
        local=usage.cached_local, peer=usage.cached_peer, ram=usage.cached_ram, ssd=usage.cached_ssd
    )
    figures = common_pb2.Usage(prompt_tokens=usage.prompt_tokens, output_tokens=usage.output_tokens, cached=cached)
    completed = worker_pb2.Completed(
        usage=figures,
        queue_s=usage.queue_s,
        pull_s=usage.pull_s,
        prefill_s=usage.prefill_s,
        accelerator_s=usage.accelerator_s,
    )
    return worker_pb2.WorkerGenerateResponse(completed=completed)


def load_proto(board: LoadBoard, *, admitted: Sequence[str] = (), ended: Sequence[str] = ()) -> worker_pb2.WorkerLoad:
    """The replica's present load."""
    load = board.load
    proto = worker_pb2.WorkerLoad(ready=board.ready and not board.draining, draining=board.draining)
    if load is not None:
        _fill_load(proto, load)
    proto.admitted.extend(admitted)
    proto.ended.extend(ended)
    return proto


def _fill_load(proto: worker_pb2.WorkerLoad, load: EngineLoad) -> None:
    proto.progress = load.progress
    proto.running_requests = load.running_requests
    proto.waiting_requests = load.waiting_requests
    proto.queued_prefill_tokens = load.queued_prefill_tokens
    proto.queued_prefill_pairs = load.queued_prefill_pairs
    proto.waiting_prefill_tokens.extend(load.waiting_prefill_tokens)
    proto.decoding_sequences = load.decoding_sequences
    proto.context_tokens = load.context_tokens
    proto.step_tokens = load.step_tokens
    if load.step_costs is not None:
        proto.step_costs.CopyFrom(worker_pb2.StepCosts(**asdict(load.step_costs)))
    proto.free_blocks = load.free_blocks
    proto.cached_blocks = load.cached_blocks
    proto.referenced_blocks = load.referenced_blocks
    proto.prefill_tokens_per_s = load.prefill_tokens_per_s
    proto.decode_step_s = load.decode_step_s
    if load.adapters is not None:
        proto.adapters.extend(load.adapters.resident[:_MAX_ADAPTERS])
        proto.idle_adapter_slots = load.adapters.idle
        proto.adapter_load_s = load.adapters.load_s
    proto.holders.extend(_holder_links(one) for one in load.holders)


def _holder_links(one: HolderLinks) -> worker_pb2.HolderLinks:
    return worker_pb2.HolderLinks(
        kind=_KIND_NUMBERS[one.kind],
        location_id=one.location_id,
        epoch=one.epoch,
        memory=_link(one.memory),
        ssd=_link(one.ssd),
        in_flight_bytes=one.in_flight_bytes,
    )


def _link(link: MeasuredLink | None) -> worker_pb2.MeasuredLink | None:
    if link is None:
        return None
    return worker_pb2.MeasuredLink(bytes_per_s=link.bytes_per_s, setup_s=link.setup_s, freshness=link.freshness)


def _sampling(proto: common_pb2.SamplingParams) -> Sampling:
    return Sampling(
        temperature=proto.temperature,
        # Absent numbers are 0 on the wire, which for these two would mean "nothing may be drawn".
        top_p=proto.top_p or 1.0,
        top_k=proto.top_k,
        min_p=proto.min_p,
        seed=proto.seed,
        presence_penalty=proto.presence_penalty,
        frequency_penalty=proto.frequency_penalty,
        repetition_penalty=proto.repetition_penalty or 1.0,
        logit_bias=dict(proto.logit_bias),
        num_logprobs=proto.num_logprobs if proto.HasField("num_logprobs") else None,
        grammar=proto.grammar,
        num_prompt_logprobs=proto.num_prompt_logprobs if proto.HasField("num_prompt_logprobs") else None,
    )


def _pull_plan(steps: Sequence[common_pb2.PullStep]) -> list[HolderRun]:
    plan: list[HolderRun] = []
    for step in steps:
        if step.kind not in _KINDS:
            break
        plan.append(
            HolderRun(
                kind=_KINDS[step.kind],
                location_id=step.location_id,
                epoch=step.epoch,
                pull_address=step.pull_address,
                grpc_address=step.grpc_address,
                first_block=step.first_block,
                num_blocks=step.num_blocks,
                num_ssd_blocks=min(step.num_ssd_blocks, step.num_blocks),
                wait_s=step.wait_s,
            )
        )
    return plan


def _add_logprob(proto: common_pb2.PositionLogprobs, token: int, logprob: PositionLogprob) -> None:
    proto.chosen.token_id = token
    proto.chosen.logprob = logprob.logprob
    proto.rank = logprob.rank
    for top_token, value in logprob.top:
        proto.top.add(token_id=top_token, logprob=value)
