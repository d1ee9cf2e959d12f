"""Which requests a replica could ever serve. Pure; what it cannot serve is refused before it holds anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from services.common.blocks import BLOCK_TOKENS
from services.worker.errors import Refused
from services.worker.messages import Sampling
from services.worker.sequence import Known, Request, Status, blocks_for

MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 128
# none: no embeddings; mean: of all tokens; last: the last token's.
Pooling = Literal["none", "mean", "last"]


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of the scheduler.

    max_queue_s: prefill time that may wait beyond what can run at once. speculation_tokens: most tokens drafted of a
    sequence in one step; speculation_rows: most rows of a step with drafts. scores_prompts: whether it has log
    probabilities of prompts. pooling: how the hidden states of a prompt become its embedding.
    """

    max_context: int
    vocab_size: int
    max_running: int = 32
    max_queue_s: float = 0.2
    prefix_cache: bool = True
    scores_prompts: bool = True
    pooling: Pooling = "none"
    speculation_tokens: int = 0
    speculation_rows: int = 8


def check_request(request: Request, limits: SchedulerLimits, num_blocks: int) -> None:
    """Raise Refused (INVALID_ARGUMENT) for a request that does not fit the model, the context or the pool."""
    num_prompt = len(request.prompt)
    total = num_prompt + request.max_tokens
    if num_prompt == 0 or request.max_tokens < 1 or request.num_choices < 1:
        raise _invalid("prompt, max_tokens and num_choices must not be empty or zero")
    if request.num_choices > MAX_CHOICES:
        raise _invalid(f"num_choices={request.num_choices} is above {MAX_CHOICES}")
    going_on = request.num_choices - sum(output.finished for output in request.known.values())
    if request.is_held and going_on > limits.max_running:
        raise _invalid(f"{going_on} choices cannot be held where {limits.max_running} run at once")
    if total > limits.max_context:
        raise _invalid(
            f"{num_prompt} prompt and {request.max_tokens} output tokens exceed a context of {limits.max_context}"
        )
    if blocks_for(total) > num_blocks:
        raise _invalid(f"{total} tokens exceed the KV cache of {num_blocks} blocks")
    if int(request.prompt.min()) < 0 or int(request.prompt.max()) >= limits.vocab_size:
        raise _invalid(f"a prompt token is outside the vocabulary of {limits.vocab_size}")
    if request.is_cacheable and len(request.prompt_ids) != num_prompt // BLOCK_TOKENS:
        raise _invalid("prompt_block_ids does not match the prompt's full blocks")
    _check_sampling(request.sampling, limits)
    if request.embeds:
        _check_embedding(request, limits)
    check_known(request, request.known, limits.vocab_size)


def check_known(request: Request, known: Mapping[int, Known], vocab_size: int) -> None:
    """Raise Refused for output that cannot have been drawn after what is known of `request` so far."""
    for choice, output in known.items():
        if not 0 <= choice < request.num_choices:
            raise _invalid(f"there is known output of choice {choice}, and {request.num_choices} are wanted")
        sequence = request.sequences[choice] if request.sequences else None
        if sequence is not None and sequence.status is Status.FINISHED:
            raise _invalid(f"choice {choice} has ended before its known output")
        num_output = len(output.tokens) + (0 if sequence is None else sequence.num_output)
        if num_output >= request.max_tokens + output.finished:
            raise _invalid(f"{num_output} known tokens of choice {choice} leave none of {request.max_tokens} to draw")
        tokens = output.tokens.tolist()
        if any(not 0 <= token < vocab_size for token in tokens):
            raise _invalid(f"a known token is outside the vocabulary of {vocab_size}")
        if not output.finished and not request.stop_token_ids.isdisjoint(tokens):
            raise _invalid(f"a known token ends choice {choice}, which is to go on")


def _check_embedding(request: Request, limits: SchedulerLimits) -> None:
    if limits.pooling == "none":
        raise _invalid("this model is served without embeddings: its workers' setting pooling is none")
    if request.num_choices > 1 or request.known or request.is_held or request.rows_to_read:
        raise _invalid("an embedding has one choice, no output and no log probabilities")


def _check_sampling(sampling: Sampling, limits: SchedulerLimits) -> None:
    """What would break a step shared with others; the gateway has checked the ranges."""
    if any(not 0 <= token < limits.vocab_size for token in sampling.logit_bias):
        raise _invalid(f"a logit_bias token is outside the vocabulary of {limits.vocab_size}")
    if max(sampling.num_logprobs or 0, sampling.num_prompt_logprobs or 0) > MAX_TOP_LOGPROBS:
        raise _invalid(f"num_logprobs or num_prompt_logprobs is above {MAX_TOP_LOGPROBS}")
    if sampling.num_prompt_logprobs is not None and not limits.scores_prompts:
        raise _invalid("this worker has no log probabilities of prompts")
    if not (0 <= sampling.temperature <= 100 and 0 < sampling.top_p <= 1 and 0 <= sampling.min_p <= 1):
        raise _invalid("temperature, top_p or min_p is out of range")
    if sampling.repetition_penalty <= 0:
        raise _invalid("repetition_penalty must be above 0")


def _invalid(detail: str) -> Refused:
    return Refused("INVALID_ARGUMENT", detail)
