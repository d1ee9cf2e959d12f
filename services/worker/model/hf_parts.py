"""How the parts of a ModelConfig that differ between families follow from a config.json: one function for each family.

Each takes the fields, with the authors' defaults where they are silent, and the head dimension.
"""

from __future__ import annotations

from typing import Any

from services.worker.model.config import MoeConfig
from services.worker.model.errors import UnsupportedModel
from services.worker.model.hf_fields import (
    Fields,
    boolean,
    integer,
    not_negative,
    num_layers,
    positive,
    positive_integer,
    shown,
)
from services.worker.model.hf_rope import FULL, SLIDING, gemma3_ropes, parse_rope, phi3_rope, whole_heads

Parts = dict[str, Any]


def head_dim_of(fields: Fields) -> int:
    """Stated, or the hidden size shared among the heads."""
    heads = positive_integer(fields, "num_attention_heads")
    return positive_integer(fields, "head_dim", integer(fields, "hidden_size") // heads)


def _plain_rope(fields: Fields, head_dim: int) -> Parts:
    return {"rope": whole_heads(parse_rope(fields, head_dim), head_dim), "attention_scale": head_dim**-0.5}


def _biases(fields: Fields) -> Parts:
    bias = boolean(fields, "attention_bias")
    return {"qkv_bias": bias, "output_bias": bias}


def _same_window(fields: Fields) -> Parts:
    """One window for all layers; null: none."""
    window = integer(fields, "sliding_window", 0)
    return {"windows": (window,) * num_layers(fields)} if window else {}


def _layer_windows(fields: Fields, sliding: list[bool]) -> Parts:
    """A window on the layers that slide; `layer_types` comes first where it is given."""
    types = fields.get("layer_types")
    if types is not None:
        if not isinstance(types, list):
            raise UnsupportedModel(f"config field layer_types = {shown(types)}: a list is needed")
        for name in types:
            if name not in (FULL, SLIDING):
                raise UnsupportedModel(f"config field layer_types: {shown(name)} is not supported")
        sliding = [name == SLIDING for name in types]
    if not any(sliding):
        return {}
    window = positive_integer(fields, "sliding_window")
    return {"windows": tuple(window if slides else 0 for slides in sliding)}


def _qwen_windows(fields: Fields) -> Parts:
    """Layers from max_window_layers on slide, where sliding is in use at all."""
    if not boolean(fields, "use_sliding_window") or fields.get("sliding_window") is None:
        return {}
    first = integer(fields, "max_window_layers")
    return _layer_windows(fields, [layer >= first for layer in range(num_layers(fields))])


def llama(fields: Fields, head_dim: int) -> Parts:
    """Llama 2 and 3."""
    return {**_plain_rope(fields, head_dim), **_biases(fields)}


def mistral(fields: Fields, head_dim: int) -> Parts:
    """Mistral: one window for all layers."""
    return {**_plain_rope(fields, head_dim), **_same_window(fields)}


def qwen2(fields: Fields, head_dim: int) -> Parts:
    """Qwen 2 and 2.5: biases on queries, keys and values, fixed."""
    return {**_plain_rope(fields, head_dim), **_qwen_windows(fields), "qkv_bias": True}


def qwen3(fields: Fields, head_dim: int) -> Parts:
    """Qwen 3: normalised heads."""
    return {**_plain_rope(fields, head_dim), **_biases(fields), **_qwen_windows(fields), "qk_norm": True}


def qwen3_moe(fields: Fields, head_dim: int) -> Parts:
    """Qwen 3's mixtures: some layers may be dense."""
    layers, count = num_layers(fields), _num_experts(fields)
    step, dense = positive_integer(fields, "decoder_sparse_step", 1), fields.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise UnsupportedModel(f"config field mlp_only_layers = {shown(dense)}: a list is needed")
    moe = MoeConfig(
        num_experts=count,
        experts_per_token=integer(fields, "num_experts_per_tok"),
        intermediate_size=integer(fields, "moe_intermediate_size"),
        renormalise=boolean(fields, "norm_topk_prob"),
        sparse=tuple(layer not in dense and count > 0 and (layer + 1) % step == 0 for layer in range(layers)),
    )
    return {**_plain_rope(fields, head_dim), **_biases(fields), "qk_norm": True, "moe": moe}


def _num_experts(fields: Fields) -> int:
    """transformers 5 writes the one name where older files have the other."""
    name = "num_experts" if fields.get("num_experts") is not None else "num_local_experts"
    return integer(fields, name)


def mixtral(fields: Fields, head_dim: int) -> Parts:
    """Mixtral: every layer a mixture."""
    moe = MoeConfig(
        num_experts=_num_experts(fields),
        experts_per_token=integer(fields, "num_experts_per_tok"),
        intermediate_size=integer(fields, "intermediate_size"),
        renormalise=True,
        sparse=(True,) * num_layers(fields),
    )
    return {**_plain_rope(fields, head_dim), **_same_window(fields), "moe": moe}


def phi3(fields: Fields, head_dim: int) -> Parts:
    """Phi-3 and Phi-4."""
    rope = phi3_rope(fields, head_dim)
    if rope.scaling is not None and rope.scaling.kind != "longrope":
        raise UnsupportedModel(f"rope scaling {rope.scaling.kind!r}: only longrope is supported for Phi-3")
    return {"rope": rope, "attention_scale": head_dim**-0.5, **_same_window(fields)}


def _gemma(fields: Fields) -> Parts:
    return {
        **_biases(fields),
        "attention_scale": positive(fields, "query_pre_attn_scalar") ** -0.5,
        "activation": "gelu_tanh",
        "post_norms": True,
        "embedding_scale": integer(fields, "hidden_size") ** 0.5,
        "attention_softcap": not_negative(fields, "attn_logit_softcapping", 0.0),
        "logit_softcap": not_negative(fields, "final_logit_softcapping", 0.0),
    }


def gemma2(fields: Fields, head_dim: int) -> Parts:
    """Gemma 2: every second layer has a window."""
    sliding = [layer % 2 == 0 for layer in range(num_layers(fields))]
    rope = whole_heads(parse_rope(fields, head_dim), head_dim)
    return {**_gemma(fields), **_layer_windows(fields, sliding), "rope": rope}


def gemma3(fields: Fields, head_dim: int) -> Parts:
    """Gemma 3: layers with a window turn by a frequency of their own."""
    pattern = positive_integer(fields, "sliding_window_pattern", positive_integer(fields, "_sliding_window_pattern", 6))
    sliding = [(layer + 1) % pattern != 0 for layer in range(num_layers(fields))]
    rope, local = (whole_heads(one, head_dim) for one in gemma3_ropes(fields, head_dim))
    windows = _layer_windows(fields, sliding)
    return {**_gemma(fields), **windows, "rope": rope, "rope_local": local if windows else None, "qk_norm": True}
