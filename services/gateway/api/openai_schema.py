"""Shape of the OpenAI request bodies: typed fields that work, and the known ones that do not with their neutral values.

Fields that nobody has heard of are accepted. A known field that is not implemented is refused unless its value means
"as if it were not there".
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class TextPart(msgspec.Struct):
    """One part of a message's content."""

    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct):
    """What an earlier answer has called. arguments: JSON, unless that answer was cut."""

    name: str
    arguments: str


class ToolCallBody(msgspec.Struct):
    """A call of an earlier answer."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessageBody(msgspec.Struct):
    """One message. function_call and the like are known so that they can be refused."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    audio: Any = None
    refusal: Any = None


class FunctionBody(msgspec.Struct):
    """A function that may be called. Whether strict or not, arguments keep to its parameters."""

    name: str
    description: str | None = None
    parameters: Any = None
    strict: bool | None = None


class ToolBody(msgspec.Struct):
    """A tool; functions are the only kind that is served."""

    type: str
    function: FunctionBody | None = None


class FunctionName(msgspec.Struct):
    """A function by its name."""

    name: str


class NamedTool(msgspec.Struct):
    """The tool that has to be called."""

    type: str
    function: FunctionName | None = None


class StreamOptions(msgspec.Struct):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class MeshOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What only this mesh knows: objectives in seconds, and the class."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    priority: Literal["interactive", "standard", "batch"] | None = None


class JsonSchemaFormat(msgspec.Struct):
    """Of a response_format. Whether strict or not, every answer keeps to the schema."""

    name: str
    schema: Any = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """OpenAI's form of an answer."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's form of an answer. disable_fallback: there is nothing to fall back to."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    # Known and not implemented.
    disable_additional_properties: bool | None = None
    structural_tag: Any = None


class CommonBody(msgspec.Struct, kw_only=True):
    """Fields of both endpoints; null is as good as absent. model: empty for the mesh's default model."""

    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    cache_salt: str | None = None
    priority: Literal["interactive", "standard", "batch"] | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    kvmesh: MeshOptions | None = None
    response_format: ResponseFormat | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    structured_outputs: StructuredOutputs | None = None
    # Known and not implemented.
    store: Any = None
    metadata: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    min_tokens: Any = None


class ChatBody(CommonBody, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: list[ChatMessageBody]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolBody] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    # Known and not implemented.
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    prediction: Any = None
    prompt_logprobs: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    moderation: Any = None


class CompletionBody(CommonBody, kw_only=True):
    """Body of /v1/completions."""

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    best_of: int | None = None
    # Known and not implemented.
    suffix: Any = None


# Values besides null that mean nothing, so that clients which spell out defaults are served.
COMMON_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "metadata": ({},),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "min_tokens": (0,),
}
CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **COMMON_NEUTRAL,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
}
COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = {**COMMON_NEUTRAL, "suffix": ("",)}
