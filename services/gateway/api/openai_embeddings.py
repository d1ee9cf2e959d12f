"""OpenAI's embeddings: from a body to the request, and from the vectors to the reply. Pure."""

from __future__ import annotations

import base64
import math
from array import array
from typing import Any, Literal

import msgspec
from kvmesh.v1.common_pb2 import Usage

from services.gateway.api.openai_prompts import PRIORITIES, prompts_of
from services.gateway.errors import InvalidRequest
from services.gateway.output import Embedded
from services.gateway.request import GenerationRequest, Plan, Sampling

EMBEDDINGS = "embeddings"


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """Body of /v1/embeddings; null is as good as absent. model: empty for the mesh's default model."""

    model: str = ""
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: Literal["interactive", "standard", "batch"] | None = None


class EmbeddingFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How the vectors are to be written. dimensions None: all that the model has."""

    is_base64: bool
    dimensions: int | None


def embedding_request(body: EmbeddingBody) -> tuple[GenerationRequest, EmbeddingFormat]:
    """Raises InvalidRequest."""
    if body.dimensions is not None and body.dimensions < 1:
        raise InvalidRequest(f"dimensions must be at least 1, not {body.dimensions}", "dimensions")
    request = GenerationRequest(
        model=body.model,
        prompts=prompts_of(body.input, "input"),
        sampling=Sampling(temperature=0.0, seed=0),
        max_tokens=1,
        cache_salt=body.cache_salt or "",
        priority=PRIORITIES.get(body.priority or "", 0),
        embeds=True,
    )
    return request, EmbeddingFormat(is_base64=body.encoding_format == "base64", dimensions=body.dimensions)


def embedding_reply(plan: Plan, form: EmbeddingFormat, vectors: list[Embedded], usage: Usage) -> dict[str, Any]:
    """The reply's object. Raises InvalidRequest where the model has fewer dimensions than asked for."""
    data = [
        {"object": "embedding", "index": one.prompt, "embedding": _written(one.values, form)}
        for one in sorted(vectors, key=lambda one: one.prompt)
    ]
    tokens = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
    return {"object": "list", "data": data, "model": plan.name or plan.model, "usage": tokens}


def _written(values: bytes, form: EmbeddingFormat) -> str | list[float]:
    """values: little-endian float32 of a vector of length one."""
    vector = array("f", values)
    if form.dimensions is not None:
        if form.dimensions > len(vector):
            raise InvalidRequest(f"the model has {len(vector)} dimensions, not {form.dimensions}", "dimensions")
        # The leading ones, of length one again.
        vector = vector[: form.dimensions]
        norm = math.sqrt(sum(value * value for value in vector)) or 1.0
        vector = array("f", [value / norm for value in vector])
    return base64.b64encode(vector.tobytes()).decode() if form.is_base64 else vector.tolist()
