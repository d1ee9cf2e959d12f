"""From a request to a plan: tokens, context limits, block ids. Pure; runs wherever the pool decides."""

from __future__ import annotations

from typing import Any

import msgspec
from kvmesh.v1.worker_pb2 import WorkerGenerateRequest

from services.common.blocks import BlockId, block_root, cache_namespace, chain_block_ids, join_ids
from services.gateway.adapters import AdapterView
from services.gateway.errors import ContextLengthExceeded, InvalidRequest
from services.gateway.request import (
    MAX_PROMPT_LOGPROBS,
    AnswerForm,
    GenerationRequest,
    Plan,
    PromptPlan,
    Sampling,
    ToolUse,
    check_request,
)
from services.gateway.text.detokenizer import decode_all
from services.gateway.text.sampling_defaults import with_defaults
from services.gateway.text.text_model import TextModel
from services.gateway.tools.parameters import text_parameters
from services.gateway.tools.tool_use import tool_form

# A leading part of so many characters for each token of the context is tokenised of a text that is much longer.
_PROBED_CHARACTERS_PER_TOKEN = 8
_MUCH_LONGER = 4


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """What of a served model enters a plan.

    limited_by: whose the context length is, for messages. pooling: of the workers that make its embeddings.
    """

    name: str
    digest: bytes
    context_length: int
    kv_dtype: str
    block_tokens: int
    layout_version: int
    vocab_size: int
    limited_by: str = "model"
    pooling: str = ""


class Tenant(msgspec.Struct, frozen=True):
    """Whose request it is. Raising either number makes the tenant's older cache blocks unreachable.

    generation: of the keys file. cleared: of the tenant's latest clearing, as the mesh knows it. context_tokens: most
    tokens of prompt and output together that it may use; 0: as many as the model allows.
    """

    name: str
    generation: int = 0
    cleared: int = 0
    context_tokens: int = 0


def make_plan(
    request: GenerationRequest,
    *,
    text: TextModel,
    view: ModelView,
    tenant: Tenant,
    block_key: bytes,
    adapter: AdapterView | None = None,
) -> Plan:
    """Check `request` against its model and prepare it. Raises InvalidRequest or ContextLengthExceeded."""
    check_request(request)
    if 0 < tenant.context_tokens < view.context_length:
        view = msgspec.structs.replace(view, context_length=tenant.context_tokens, limited_by="tenant")
    _check_token_ids(request, view)
    root = block_root(
        block_key,
        model_digest=view.digest,
        kv_dtype=view.kv_dtype,
        layout_version=view.layout_version,
        namespace=cache_namespace(
            tenant=tenant.name,
            generation=tenant.generation,
            cleared=tenant.cleared,
            cache_salt=request.cache_salt,
        ),
        adapter_digest=adapter.digest if adapter is not None else None,
    )
    field = request.field
    if request.chat is not None:
        tokens = [_chat_tokens(request.chat, request.tools, text, view)]
    else:
        tokens = [_tokens(prompt, text, view, field) for prompt in request.prompts]
    _check_scored(request, sum(map(len, tokens)))
    budgets = [_output_budget(len(ids), request.max_tokens, view, field) for ids in tokens]
    eos = () if request.ignore_eos else text.eos_token_ids
    form = _form(request, text)
    return Plan(
        model=view.name,
        model_digest=view.digest,
        block_root=root,
        block_tokens=view.block_tokens,
        prompts=[
            _prompt_plan(ids, _block_ids(block_key, root, ids, view), budget, _echo(request, i, ids, text))
            for i, (ids, budget) in enumerate(zip(tokens, budgets, strict=True))
        ],
        sampling=_sampling(request, form, text),
        num_choices=request.num_choices,
        stop=request.stop,
        stop_token_ids=tuple(sorted({*request.stop_token_ids, *eos})),
        priority=request.priority,
        ttft_s=request.ttft_s,
        tpot_s=request.tpot_s,
        form=form,
        functions=_functions(request),
        vocab_size=view.vocab_size,
        name=request.model,
        adapter=adapter,
        embeds=request.embeds,
        pooling=view.pooling if request.embeds else "",
    )


def _form(request: GenerationRequest, text: TextModel) -> AnswerForm | None:
    if request.form is not None and not text.eos_token_ids:
        raise InvalidRequest(
            f"{request.form.field}: the model {text.name} has no token that ends an answer", request.form.field
        )
    if isinstance(request.form, ToolUse):
        return tool_form(request.form, text.calls.format, text.calls.control)
    return request.form


def _functions(request: GenerationRequest) -> dict[str, frozenset[str]]:
    functions = request.form.functions if isinstance(request.form, ToolUse) else ()
    return {function.name: text_parameters(function.parameters) for function in functions}


def _sampling(request: GenerationRequest, form: AnswerForm | None, text: TextModel) -> Sampling:
    sampling = with_defaults(request.sampling, text.sampling_defaults)
    return sampling if form is None else msgspec.structs.replace(sampling, grammar=form.grammar)


def _prompt_plan(ids: list[int], block_ids: bytes, max_tokens: int, echo: str) -> PromptPlan:
    message = WorkerGenerateRequest(prompt_token_ids=ids, prompt_block_ids=block_ids).SerializeToString()
    return PromptPlan(message=message, num_tokens=len(ids), block_ids=block_ids, max_tokens=max_tokens, echo=echo)


def _chat_tokens(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], text: TextModel, view: ModelView
) -> list[int]:
    _refuse_hopeless("".join(message["content"] for message in messages), text, view, "messages")
    return _some(text.encode_chat(messages, tools), "messages")


def _tokens(prompt: str | list[int], text: TextModel, view: ModelView, field: str) -> list[int]:
    if isinstance(prompt, str):
        _refuse_hopeless(prompt, text, view, field)
        return _some(text.encode_text(prompt), field)
    return _some(prompt, field)


def _some(ids: list[int], field: str) -> list[int]:
    if not ids:
        raise InvalidRequest("the prompt has no tokens", field)
    return ids


def _refuse_hopeless(text: str, model: TextModel, view: ModelView, field: str) -> None:
    """A text that cannot fit is not tokenised whole: its size alone tells, or a leading part that is too long already.

    Tokens end where words do, so those of the part but for its last word are tokens of the whole.
    """
    least = model.least_tokens(len(text))
    part = text[: _PROBED_CHARACTERS_PER_TOKEN * view.context_length]
    if least <= view.context_length and len(text) >= _MUCH_LONGER * len(part):
        least = len(model.encode_text(part))
    if least > view.context_length:
        raise _too_long(f"at least {least}", view, field)


def _output_budget(num_prompt: int, max_tokens: int | None, view: ModelView, field: str) -> int:
    left = view.context_length - num_prompt
    if left < 1:
        raise _too_long(str(num_prompt), view, field)
    if max_tokens is None:
        return left
    if max_tokens > left:
        raise ContextLengthExceeded(
            f"This {view.limited_by}'s maximum context length is {view.context_length} tokens, but "
            f"{num_prompt + max_tokens} were requested ({num_prompt} in the {field}, {max_tokens} for the completion).",
            "max_tokens",
        )
    return max_tokens


def _too_long(num_prompt: str, view: ModelView, field: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"This {view.limited_by}'s maximum context length is {view.context_length} tokens, but the {field} has "
        f"{num_prompt} tokens and at least one is needed for the completion.",
        field,
    )


def _block_ids(key: bytes, root: BlockId, ids: list[int], view: ModelView) -> bytes:
    return join_ids(chain_block_ids(key, root, ids, view.block_tokens))


def _check_token_ids(request: GenerationRequest, view: ModelView) -> None:
    for prompt in request.prompts:
        if not isinstance(prompt, str) and not all(0 <= i < view.vocab_size for i in prompt):
            raise InvalidRequest(f"a token id is outside the vocabulary of {view.vocab_size}", request.field)
    if not all(0 <= i < view.vocab_size for i in request.stop_token_ids):
        raise InvalidRequest(f"a token id is outside the vocabulary of {view.vocab_size}", "stop_token_ids")
    if not all(0 <= i < view.vocab_size for i in request.sampling.logit_bias):
        raise InvalidRequest(f"a token id is outside the vocabulary of {view.vocab_size}", "logit_bias")


def _check_scored(request: GenerationRequest, num_tokens: int) -> None:
    num_top = request.sampling.num_prompt_logprobs
    if num_top is None:
        return
    # Each choice repeats those of its prompt.
    num_told = num_tokens * request.num_choices
    if num_told * (num_top + 1) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"{num_top + 1} log probabilities of each of {num_told} prompt tokens, those of all choices: more than "
            f"{MAX_PROMPT_LOGPROBS}",
            "prompt_logprobs",
        )


def _echo(request: GenerationRequest, index: int, ids: list[int], text: TextModel) -> str:
    if not request.echo:
        return ""
    prompt = request.prompts[index]
    return prompt if isinstance(prompt, str) else decode_all(text.vocabulary, ids)
