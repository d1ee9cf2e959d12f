"""What a model's makers recommend for sampling; used for every field that a request leaves out.

Read from generation_config.json of a folder and from `general.sampling.*` of a GGUF file; values out of the API's
range are ignored, for a request with them would be refused. Without a recommendation the API's own defaults hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from services.common.models import DEFAULT_MODEL, DEFAULT_MODEL_SAMPLING
from services.gateway.errors import InvalidRequest
from services.gateway.request import Sampling, check_sampling

# The API's defaults: sampling from the model's own distribution.
NEUTRAL = Sampling(
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
)
_GGUF_NAMES = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
_FOLDER_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def folder_defaults(generation_config: Mapping[str, Any]) -> Sampling:
    """Defaults out of generation_config.json; one that does not sample recommends nothing."""
    sampled = generation_config if generation_config.get("do_sample") else {}
    return _defaults({name: sampled.get(name) for name in _FOLDER_NAMES})


def gguf_defaults(name: str, metadata: Mapping[str, Any]) -> Sampling:
    """Defaults out of GGUF metadata. The packaged default model's file has none; its model card's are used."""
    found = {field: metadata.get(f"general.sampling.{key}") for field, key in _GGUF_NAMES.items()}
    if name == DEFAULT_MODEL and not any(found.values()):
        found = dict(DEFAULT_MODEL_SAMPLING)
    return _defaults(found)


def with_defaults(sampling: Sampling, defaults: Sampling) -> Sampling:
    """`sampling` with every field that was left out taken from `defaults`."""
    absent = {
        name: value for name, value in msgspec.structs.asdict(defaults).items() if getattr(sampling, name) is None
    }
    return msgspec.structs.replace(sampling, **absent)


def _defaults(found: Mapping[str, Any]) -> Sampling:
    defaults = NEUTRAL
    for name, value in found.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            changed = msgspec.structs.replace(defaults, **{name: value})
            try:
                check_sampling(changed)
            except InvalidRequest:
                continue
            defaults = changed
    return defaults
