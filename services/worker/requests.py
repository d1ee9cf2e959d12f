"""From the message of an attempt to the request that the scheduler knows, and from that to its final figures. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.common.blocks import BlockId, split_ids
from services.worker.errors import Refused
from services.worker.messages import KnownOutput, RequestUsage, Submit
from services.worker.sequence import Int32Array, Known, Request


def request_of(message: Submit, now: float) -> Request:
    """The request of a message. Raises Refused for ids and tokens that are no whole ones, and choices named twice."""
    try:
        prompt_ids, prompt = split_ids(message.prompt_block_ids), _tokens(message.prompt)
    except ValueError as error:
        raise Refused("INVALID_ARGUMENT", str(error)) from None
    known = known_by_choice(message.known)
    known_tokens = sum(len(output.tokens) for output in known.values())
    return Request(
        key=message.key,
        request_id=message.request_id,
        prompt=prompt,
        block_root=BlockId(message.block_root),
        prompt_ids=prompt_ids if message.block_root else [],
        owner_digest=message.owner_digest,
        sampling=message.sampling,
        num_choices=message.num_choices,
        max_tokens=message.max_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        pull_plan=message.pull_plan,
        priority=message.priority,
        expected_local_blocks=message.expected_local_blocks,
        arrival_s=now,
        deadline_s=now + message.deadline_s,
        traceparent=message.traceparent,
        known=known,
        held_until_s=now + message.hold_s if message.hold_s > 0 else None,
        was_held=message.hold_s > 0,
        output_tokens=known_tokens,
        known_tokens=known_tokens,
        embeds=message.embeds,
        # Who begins with output has been told of the prompt.
        rows_to_read=len(prompt) - 1 if message.sampling.num_prompt_logprobs is not None and not known_tokens else 0,
    )


def known_by_choice(outputs: Sequence[KnownOutput]) -> dict[int, Known]:
    """What is known, by choice. Raises Refused for tokens that are no whole ones, and choices named twice."""
    known: dict[int, Known] = {}
    for output in outputs:
        if output.choice in known:
            raise Refused("INVALID_ARGUMENT", f"the known output of choice {output.choice} is given twice")
        try:
            known[output.choice] = Known(_tokens(output.token_ids), output.finished)
        except ValueError as error:
            raise Refused("INVALID_ARGUMENT", str(error)) from None
    return known


def usage_of(request: Request) -> RequestUsage:
    """What has been done for a request so far."""
    first_step_s = request.first_step_s if request.first_step_s is not None else request.arrival_s
    cached = request.cached_tokens
    return RequestUsage(
        key=request.key,
        prompt_tokens=len(request.prompt),
        output_tokens=request.output_tokens,
        cached_local=cached.get("local", 0),
        cached_peer=cached.get("peer", 0),
        cached_ram=cached.get("ram", 0),
        cached_ssd=cached.get("ssd", 0),
        queue_s=max(0.0, first_step_s - request.arrival_s - request.pull_s),
        pull_s=request.pull_s,
        prefill_s=max(0.0, request.prefill_end_s - first_step_s),
        known_tokens=request.known_tokens,
        accelerator_s=request.accelerator_s,
    )


def _tokens(raw: bytes) -> Int32Array:
    """Token ids of a message; those above 2**31 come out negative and are refused with other foreign ones."""
    return np.frombuffer(raw, dtype="<u4").astype(np.int32)
