"""OpenAI request bodies into GenerationRequests. Pure; every mistake is one InvalidRequest that names its field."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from services.gateway.api.openai_embeddings import EMBEDDINGS, EmbeddingBody, EmbeddingFormat, embedding_request
from services.gateway.api.openai_form import answer_form
from services.gateway.api.openai_prompts import PRIORITIES, prompts_of
from services.gateway.api.openai_schema import (
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    ChatBody,
    ChatMessageBody,
    CommonBody,
    CompletionBody,
)
from services.gateway.api.openai_tools import message_calls, told_tools, tool_use
from services.gateway.errors import InvalidRequest, UnsupportedParameter
from services.gateway.request import MAX_LOGPROBS, AnswerForm, GenerationRequest, Sampling, ToolUse

B = TypeVar("B", bound=CommonBody)
T = TypeVar("T", bound=msgspec.Struct)
CHAT, COMPLETIONS = "chat", "completions"
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_REPLACED = {"functions": "tools", "function_call": "tool_choice"}
# The other tiers leave the class to the tenant's default.
_TIERS = {"priority": "interactive", "flex": "batch"}
_I64_MIN, _U64 = -(2**63), 2**64
_decoders: dict[type[msgspec.Struct], msgspec.json.Decoder[Any]] = {
    body: msgspec.json.Decoder(body) for body in (ChatBody, CompletionBody, EmbeddingBody)
}


class ReplyFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How the answer is to be written. logprobs, prompt_logprobs None: none.

    echoes_logprobs: those of the prompt stand before those of the answer. embedding: of embeddings, and nothing else.
    """

    endpoint: str
    stream: bool
    include_usage: bool
    logprobs: int | None
    end_user: str
    prompt_logprobs: int | None = None
    echoes_logprobs: bool = False
    embedding: EmbeddingFormat | None = None


def parse_openai(endpoint: str, body: bytes) -> tuple[GenerationRequest, ReplyFormat]:
    """The request and the format of its answer. Raises InvalidRequest."""
    if endpoint == EMBEDDINGS:
        return _embedding(_decoded(body, EmbeddingBody))
    if endpoint == CHAT:
        return _chat(_decode(body, ChatBody, CHAT_NEUTRAL))
    return _completion(_decode(body, CompletionBody, COMPLETION_NEUTRAL))


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        parsed: T = _decoders[kind].decode(body)
        return parsed
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        missing = reason.partition("missing required field `")[2].rstrip("`")
        param = ".".join(part for part in (path.strip("`.").replace("[...]", ""), missing) if part) or None
        raise InvalidRequest(reason if param is None else f"{param}: {reason}", param) from None
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not valid UTF-8") from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


def _decode(body: bytes, kind: type[B], neutral: dict[str, tuple[Any, ...]]) -> B:
    parsed = _decoded(body, kind)
    for name, allowed in neutral.items():
        value = getattr(parsed, name)
        if value is not None and not any(type(value) is type(other) and value == other for other in allowed):
            instead = f"; {_REPLACED[name]} takes its place" if name in _REPLACED else ""
            raise UnsupportedParameter(f"{name} is not supported{instead}", name)
    if parsed.stream_options is not None:
        if not parsed.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true", "stream_options")
        if parsed.stream_options.include_obfuscation:
            raise UnsupportedParameter("include_obfuscation is not supported", "stream_options.include_obfuscation")
    return parsed


def _chat(body: ChatBody) -> tuple[GenerationRequest, ReplyFormat]:
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise InvalidRequest("max_tokens and max_completion_tokens disagree", "max_completion_tokens")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
        _check_logprobs("top_logprobs", body.top_logprobs)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    use = tool_use(body)
    request = GenerationRequest(
        chat=[_message(message, i) for i, message in enumerate(body.messages)],
        tools=told_tools(body.tools or []) if use is not None else [],
        **_common(body, max_tokens, logprobs, _chat_form(body, use)),
    )
    return request, _format(CHAT, body, logprobs)


def _chat_form(body: ChatBody, use: ToolUse | None) -> AnswerForm | ToolUse | None:
    form = answer_form(body)
    if use is None:
        return form
    if form is not None:
        raise InvalidRequest(f"{form.field} cannot go with tools unless tool_choice is none", form.field)
    return use


def _completion(body: CompletionBody) -> tuple[GenerationRequest, ReplyFormat]:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise UnsupportedParameter("best_of other than n is not supported", "best_of")
    if body.logprobs is not None:
        _check_logprobs("logprobs", body.logprobs)
    common = _common(body, body.max_tokens, body.logprobs, answer_form(body))
    scored = _scored(body)
    if scored is not None:
        common["sampling"] = msgspec.structs.replace(common["sampling"], num_prompt_logprobs=scored)
    request = GenerationRequest(prompts=_prompts(body.prompt), echo=bool(body.echo), **common)
    reply = msgspec.structs.replace(
        _format(COMPLETIONS, body, body.logprobs),
        prompt_logprobs=body.prompt_logprobs,
        echoes_logprobs=bool(body.echo) and body.logprobs is not None,
    )
    return request, reply


def _embedding(body: EmbeddingBody) -> tuple[GenerationRequest, ReplyFormat]:
    request, form = embedding_request(body)
    return request, ReplyFormat(
        endpoint=EMBEDDINGS,
        stream=False,
        include_usage=False,
        logprobs=None,
        end_user=body.user or "",
        embedding=form,
    )


def _scored(body: CompletionBody) -> int | None:
    """Of how many tokens at each place of the prompt log probabilities are needed."""
    wanted = {
        "prompt_logprobs": body.prompt_logprobs,
        "echo together with logprobs": body.logprobs if body.echo else None,
    }
    if body.prompt_logprobs is not None:
        _check_logprobs("prompt_logprobs", body.prompt_logprobs)
    for name, value in wanted.items():
        if value is not None and body.stream:
            raise UnsupportedParameter(f"{name} is not supported in streams", name.partition(" ")[0])
    return max((value for value in wanted.values() if value is not None), default=None)


def _common(
    body: CommonBody, max_tokens: int | None, logprobs: int | None, form: AnswerForm | ToolUse | None
) -> dict[str, Any]:
    given = {
        name: getattr(body, name)
        for name in Sampling.__struct_fields__
        if name not in ("logit_bias", "num_logprobs", "num_prompt_logprobs", "seed", "grammar")
        and getattr(body, name) is not None
    }
    sampling = Sampling(**given, seed=_seed(body.seed), logit_bias=_logit_bias(body.logit_bias), num_logprobs=logprobs)
    stop = body.stop if isinstance(body.stop, list) else [] if body.stop is None else [body.stop]
    return {
        "model": body.model,
        "sampling": sampling,
        "num_choices": 1 if body.n is None else body.n,
        "max_tokens": max_tokens,
        "stop": tuple(stop),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "ignore_eos": bool(body.ignore_eos),
        "cache_salt": body.cache_salt or "",
        "priority": _priority(body),
        "ttft_s": (body.kvmesh.ttft_s if body.kvmesh is not None else None) or 0.0,
        "tpot_s": (body.kvmesh.tpot_s if body.kvmesh is not None else None) or 0.0,
        "form": form,
    }


def _priority(body: CommonBody) -> int:
    """The class of proto PriorityClass, 0 for the tenant's default."""
    given = {
        "priority": body.priority,
        "kvmesh.priority": body.kvmesh.priority if body.kvmesh is not None else None,
        "service_tier": _TIERS.get(body.service_tier or ""),
    }
    wanted = {name: value for name, value in given.items() if value is not None}
    if len(set(wanted.values())) > 1:
        raise InvalidRequest(f"{' and '.join(wanted)} disagree", list(wanted)[-1])
    return PRIORITIES[next(iter(wanted.values()))] if wanted else 0


def _format(endpoint: str, body: CommonBody, logprobs: int | None) -> ReplyFormat:
    options = body.stream_options
    return ReplyFormat(
        endpoint=endpoint,
        stream=bool(body.stream),
        include_usage=bool(options is not None and options.include_usage),
        logprobs=logprobs,
        end_user=body.safety_identifier or body.user or "",
    )


def _message(message: ChatMessageBody, index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    for name in ("function_call", "audio", "refusal"):
        if getattr(message, name) is not None:
            raise UnsupportedParameter(f"{name} in a message is not supported", f"{where}.{name}")
    if message.role == "function":
        raise UnsupportedParameter("role 'function' is not supported; tool takes its place", f"{where}.role")
    if message.role not in _ROLES:
        raise InvalidRequest("role must be one of system, developer, user, assistant, tool", f"{where}.role")
    rendered = {"role": _ROLES[message.role], "content": _content(message, where), **message_calls(message, where)}
    if message.name is not None:
        rendered["name"] = message.name
    return rendered


def _content(message: ChatMessageBody, where: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.tool_calls:
            return ""
        raise InvalidRequest("content must be a string or a list of text parts", f"{where}.content")
    for i, part in enumerate(message.content):
        if part.type != "text":
            raise UnsupportedParameter(f"content part of type {part.type!r} is not supported", f"{where}.content[{i}]")
        if part.text is None:
            raise InvalidRequest("a text part must have text", f"{where}.content[{i}].text")
    return "".join(part.text or "" for part in message.content)


def _prompts(prompt: str | list[Any] | None) -> list[str | list[int]]:
    if prompt is None:
        raise InvalidRequest("prompt must be given", "prompt")
    return prompts_of(prompt, "prompt")


def _seed(seed: int | None) -> int | None:
    if seed is None:
        return None
    if not _I64_MIN <= seed < _U64:
        raise InvalidRequest("seed must be a 64-bit number", "seed")
    return seed % _U64


def _logit_bias(given: dict[str, float] | None) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in (given or {}).items()}
    except ValueError:
        raise InvalidRequest("logit_bias keys must be token ids", "logit_bias") from None


def _check_logprobs(name: str, value: int) -> None:
    if not 0 <= value <= MAX_LOGPROBS:
        raise InvalidRequest(f"{name} must be between 0 and {MAX_LOGPROBS}, not {value}", name)
