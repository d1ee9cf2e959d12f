"""Which version of a public name serves a request. Pure.

Weighted rendezvous hashing: a version of weight w draws -ln(u) / w with u a hash of the conversation and the version,
and the least draw wins. So each version gets its share, a conversation keeps its version and with it its cached
blocks, and when weights change only conversations that a version gained or lost move.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b

import msgspec

from services.gateway.adapters import SEPARATOR
from services.gateway.planning import ModelView
from services.gateway.request import GenerationRequest

# So much of a raw prompt tells its conversation: beyond what applications put before every prompt, and short enough
# that a conversation soon keeps the version of its first turns.
_PREFIX_CHARACTERS = 4096
_PREFIX_TOKENS = 1024
_TWO_64 = 2.0**64


class VersionView(msgspec.Struct, frozen=True):
    """One version that requests may get. weight: more than 0; its part of all weights is its share of the requests."""

    view: ModelView
    weight: float


# Of each name the versions that requests may get.
Views = dict[str, tuple[VersionView, ...]]


def resolved(name: str, models: Collection[str], aliases: Mapping[str, str]) -> str:
    """The model that a name stands for; a model's own name goes before an alias.

    An alias with an adapter stands for its model with that adapter.
    """
    if name in models:
        return name
    if name in aliases:
        return aliases[name]
    alias, _, adapter = name.rpartition(SEPARATOR)
    if alias and alias not in models and alias in aliases:
        return f"{aliases[alias]}{SEPARATOR}{adapter}"
    return name


def choose(versions: Sequence[VersionView], key: bytes) -> ModelView:
    """The version of a conversation; there must be one. key: `conversation_key`."""
    if len(versions) == 1:
        return versions[0].view
    return min(versions, key=lambda version: (_draw(version, key), version.view.digest)).view


def without(views: Views, name: str, digest: bytes) -> Views | None:
    """The views but for one version of a name; None when the name has no other."""
    left = tuple(version for version in views.get(name, ()) if version.view.digest != digest)
    return {**views, name: left} if left else None


def only(views: Views, name: str, digest: bytes) -> Views | None:
    """The views with one version alone of a name; None when the name has it no longer."""
    left = tuple(version for version in views.get(name, ()) if version.view.digest == digest)
    return {**views, name: left} if left else None


def conversation_key(tenant: str, request: GenerationRequest) -> bytes:
    """What the turns of one conversation have in common, as a hash.

    The cache salt where there is one. Else of a chat all up to the first message of the user; of other requests the
    beginning of the first prompt.
    """
    hashed = blake2b(digest_size=16)
    parts = [tenant, request.cache_salt] if request.cache_salt else [tenant, "", *_beginning(request)]
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        hashed.update(len(encoded).to_bytes(8, "little") + encoded)
    return hashed.digest()


def _beginning(request: GenerationRequest) -> list[str]:
    if request.chat is not None:
        roles = [message["role"] for message in request.chat]
        end = roles.index("user") + 1 if "user" in roles else len(roles)
        return [text for message in request.chat[:end] for text in (message["role"], message["content"])]
    if not request.prompts:
        return []
    prompt = request.prompts[0]
    if isinstance(prompt, str):
        return [prompt[:_PREFIX_CHARACTERS]]
    return [",".join(map(str, prompt[:_PREFIX_TOKENS]))]


def _draw(version: VersionView, key: bytes) -> float:
    number = int.from_bytes(blake2b(version.view.digest, key=key, digest_size=8).digest(), "little")
    return -math.log((number + 0.5) / _TWO_64) / version.weight
