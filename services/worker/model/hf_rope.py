"""The rotary embedding in a config.json: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`.

What a scaling needs and what it may have are known for each type; any other parameter that is set refuses the model.
"""

from __future__ import annotations

from collections.abc import Callable

from services.worker.model.config import RopeConfig, RopeScaling
from services.worker.model.errors import UnsupportedModel
from services.worker.model.hf_fields import Fields, boolean, number, numbers, positive, positive_integer, shown
from services.worker.model.rope import longrope_attention, yarn_attention

DEFAULT_THETA = 10000.0
_ALWAYS_KNOWN = frozenset(("rope_type", "type", "rope_theta", "partial_rotary_factor"))
# Layer types of transformers 5, where each may have its own rotary embedding.
FULL, SLIDING = "full_attention", "sliding_attention"


def parse_rope(fields: Fields, head_dim: int, parameters: Fields | None = None) -> RopeConfig:
    """The rotary embedding of all layers, or the one that `parameters` describe. Raises UnsupportedModel."""
    if parameters is None:
        parameters = _parameters(fields)
    theta = positive(parameters, "rope_theta", positive(fields, "rope_theta", DEFAULT_THETA))
    partial = positive(parameters, "partial_rotary_factor", positive(fields, "partial_rotary_factor", 1.0))
    return RopeConfig(theta, int(head_dim * partial), _scaling(fields, parameters))


def _parameters(fields: Fields) -> Fields:
    """Those of transformers 5 or those before; a file with both may mean either."""
    new, old = fields.get("rope_parameters"), fields.get("rope_scaling")
    if new and old:
        raise UnsupportedModel(f"config field rope_scaling = {shown(old)}: not supported beside rope_parameters")
    parameters: object = new or old or {}
    if not isinstance(parameters, dict):
        raise UnsupportedModel(f"rope parameters {shown(parameters)}: an object is needed")
    return parameters


def _scaling(fields: Fields, parameters: Fields) -> RopeScaling | None:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        known, scaling = frozenset[str](), None
    elif isinstance(kind, str) and kind in _SCALINGS:
        known, parse = _SCALINGS[kind]
        scaling = parse(fields, parameters)
    else:
        raise UnsupportedModel(f"rope scaling {shown(kind)}: only default, {', '.join(_SCALINGS)} are supported")
    for name in sorted(parameters.keys() - known - _ALWAYS_KNOWN):
        if parameters[name] is not None:
            raise UnsupportedModel(f"rope field {name} = {shown(parameters[name])} is not supported with {kind}")
    return scaling


def _linear(fields: Fields, parameters: Fields) -> RopeScaling:
    return RopeScaling("linear", factor=positive(parameters, "factor"))


def _dynamic(fields: Fields, parameters: Fields) -> RopeScaling:
    length = positive_integer(fields, "max_position_embeddings")
    return RopeScaling("dynamic", factor=positive(parameters, "factor"), original_max_positions=length)


def _llama3(fields: Fields, parameters: Fields) -> RopeScaling:
    scaling = RopeScaling(
        "llama3",
        factor=positive(parameters, "factor"),
        low_freq_factor=positive(parameters, "low_freq_factor"),
        high_freq_factor=positive(parameters, "high_freq_factor"),
        original_max_positions=positive_integer(parameters, "original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise UnsupportedModel(f"rope field high_freq_factor = {scaling.high_freq_factor}: not over low_freq_factor")
    return scaling


def _yarn(fields: Fields, parameters: Fields) -> RopeScaling:
    original = _original_length(fields, parameters)
    factor = positive(parameters, "factor", positive_integer(fields, "max_position_embeddings", original) / original)
    return RopeScaling(
        "yarn",
        factor=factor,
        original_max_positions=original,
        beta_fast=positive(parameters, "beta_fast", 32.0),
        beta_slow=positive(parameters, "beta_slow", 1.0),
        attention_factor=positive(parameters, "attention_factor", _yarn_attention(parameters, factor)),
        truncate=boolean(parameters, "truncate", True),
    )


def _yarn_attention(parameters: Fields, factor: float) -> float:
    weights = [number(parameters, name, 0.0) for name in ("mscale", "mscale_all_dim")]
    if all(weights):
        values = [yarn_attention(factor, weight) for weight in weights]
        if min(values) <= 0.0:
            raise UnsupportedModel(f"rope fields mscale, mscale_all_dim = {weights}: must not be negative")
        return values[0] / values[1]
    return yarn_attention(factor)


def _longrope(fields: Fields, parameters: Fields) -> RopeScaling:
    original = _original_length(fields, parameters)
    factor = positive(parameters, "factor", positive_integer(fields, "max_position_embeddings", original) / original)
    return RopeScaling(
        "longrope",
        factor=factor,
        original_max_positions=original,
        attention_factor=positive(parameters, "attention_factor", longrope_attention(factor, original)),
        frequency_divisors=numbers(parameters, "long_factor"),
        short_divisors=numbers(parameters, "short_factor"),
    )


def _original_length(fields: Fields, parameters: Fields) -> int:
    """Phi-3 states it outside of the rotary parameters; that one counts."""
    name = "original_max_position_embeddings"
    where = next((place for place in (fields, parameters) if place.get(name) is not None), None)
    return positive_integer(fields, "max_position_embeddings") if where is None else positive_integer(where, name)


_SCALINGS: dict[str, tuple[frozenset[str], Callable[[Fields, Fields], RopeScaling]]] = {
    "linear": (frozenset(("factor",)), _linear),
    "dynamic": (frozenset(("factor",)), _dynamic),
    "llama3": (
        frozenset(("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")),
        _llama3,
    ),
    "yarn": (
        frozenset(
            (
                "factor",
                "original_max_position_embeddings",
                "beta_fast",
                "beta_slow",
                "attention_factor",
                "mscale",
                "mscale_all_dim",
                "truncate",
                "finetuned",
            )
        ),
        _yarn,
    ),
    "longrope": (
        frozenset(("factor", "original_max_position_embeddings", "attention_factor", "long_factor", "short_factor")),
        _longrope,
    ),
}


def phi3_rope(fields: Fields, head_dim: int) -> RopeConfig:
    """Phi-3 names its only scaling longrope, and named it su or yarn before."""
    parameters = dict(_parameters(fields))
    kind = parameters.pop("type", None) or parameters.get("rope_type")
    parameters["rope_type"] = "longrope" if kind in ("su", "yarn") else kind
    return parse_rope(fields, head_dim, parameters)


def gemma3_ropes(fields: Fields, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Of layers that see everything, and of those with a window."""
    nested = _parameters(fields)
    if FULL in nested or SLIDING in nested:
        for name in sorted(nested.keys() - {FULL, SLIDING}):
            raise UnsupportedModel(f"rope field {name} = {shown(nested[name])} is not supported")
        full, local = _nested(nested, FULL, theta=1e6), _nested(nested, SLIDING, theta=1e4)
        return parse_rope(fields, head_dim, full), parse_rope(fields, head_dim, local)
    full = {"rope_theta": positive(fields, "rope_theta", 1e6), **nested}
    local_theta = positive(fields, "rope_local_base_freq", 1e4)
    return parse_rope(fields, head_dim, full), parse_rope(fields, head_dim, {"rope_theta": local_theta})


def _nested(parameters: Fields, kind: str, *, theta: float) -> Fields:
    """Of one kind of layer."""
    own = parameters.get(kind) or {}
    if not isinstance(own, dict):
        raise UnsupportedModel(f"rope field {kind} = {shown(own)}: an object is needed")
    return {"rope_theta": theta, **own}


def whole_heads(rope: RopeConfig, head_dim: int) -> RopeConfig:
    """The same, of a family whose heads always turn as a whole. Raises UnsupportedModel."""
    if rope.rotary_dim != head_dim:
        raise UnsupportedModel(
            f"config field partial_rotary_factor = {rope.rotary_dim / head_dim}: only 1.0 is supported"
        )
    return rope
