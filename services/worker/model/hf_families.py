"""What each model family reads in a config.json, and what it means: one entry of `FAMILIES` each.

A family states the fields it reads beyond those of all, the values that stand where its authors leave one out (as
transformers takes them), the values that are the only ones implemented, and how the rest of a ModelConfig follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.worker.model.config import MoeConfig
from services.worker.model.errors import UnsupportedModel
from services.worker.model.hf_fields import Fields, boolean, integer, number, shown
from services.worker.model.hf_rope import FULL, SLIDING, gemma3_ropes, parse_rope, phi3_rope, whole_heads

Parts = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """architecture: the name here. class_name: of transformers. build: fields and head_dim to parts of ModelConfig."""

    architecture: str
    class_name: str
    build: Callable[[Fields, int], Parts]
    reads: frozenset[str] = frozenset()
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)


def head_dim_of(fields: Fields) -> int:
    """Stated, or the hidden size shared among the heads."""
    heads = integer(fields, "num_attention_heads")
    return integer(fields, "head_dim", integer(fields, "hidden_size") // max(heads, 1))


def _plain_rope(fields: Fields, head_dim: int) -> Parts:
    return {"rope": whole_heads(parse_rope(fields, head_dim), head_dim), "attention_scale": head_dim**-0.5}


def _biases(fields: Fields) -> Parts:
    bias = boolean(fields, "attention_bias")
    return {"qkv_bias": bias, "output_bias": bias}


def _same_window(fields: Fields) -> Parts:
    """One window for all layers; null: none."""
    window = integer(fields, "sliding_window", 0)
    return {"windows": (window,) * integer(fields, "num_hidden_layers")} if window else {}


def _layer_windows(fields: Fields, sliding: list[bool]) -> Parts:
    """A window on the layers that slide; `layer_types` comes first where it is given."""
    types = fields.get("layer_types")
    if types is not None:
        for name in types if isinstance(types, list) else [types]:
            if name not in (FULL, SLIDING):
                raise UnsupportedModel(f"config field layer_types: {shown(name)} is not supported")
        sliding = [name == SLIDING for name in types]
    if not any(sliding):
        return {}
    window = integer(fields, "sliding_window")
    return {"windows": tuple(window if slides else 0 for slides in sliding)}


def _qwen_windows(fields: Fields) -> Parts:
    """Layers from max_window_layers on slide, where sliding is in use at all."""
    if not boolean(fields, "use_sliding_window") or fields.get("sliding_window") is None:
        return {}
    first = integer(fields, "max_window_layers")
    return _layer_windows(fields, [layer >= first for layer in range(integer(fields, "num_hidden_layers"))])


def _llama(fields: Fields, head_dim: int) -> Parts:
    return {**_plain_rope(fields, head_dim), **_biases(fields)}


def _mistral(fields: Fields, head_dim: int) -> Parts:
    return {**_plain_rope(fields, head_dim), **_same_window(fields)}


def _qwen2(fields: Fields, head_dim: int) -> Parts:
    return {**_plain_rope(fields, head_dim), **_qwen_windows(fields), "qkv_bias": True}


def _qwen3(fields: Fields, head_dim: int) -> Parts:
    return {**_plain_rope(fields, head_dim), **_biases(fields), **_qwen_windows(fields), "qk_norm": True}


def _qwen3_moe(fields: Fields, head_dim: int) -> Parts:
    layers, count = integer(fields, "num_hidden_layers"), _num_experts(fields)
    step, dense = integer(fields, "decoder_sparse_step", 1), fields.get("mlp_only_layers") or []
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


def _mixtral(fields: Fields, head_dim: int) -> Parts:
    moe = MoeConfig(
        num_experts=_num_experts(fields),
        experts_per_token=integer(fields, "num_experts_per_tok"),
        intermediate_size=integer(fields, "intermediate_size"),
        renormalise=True,
        sparse=(True,) * integer(fields, "num_hidden_layers"),
    )
    return {**_plain_rope(fields, head_dim), **_same_window(fields), "moe": moe}


def _phi3(fields: Fields, head_dim: int) -> Parts:
    rope = phi3_rope(fields, head_dim)
    if rope.scaling is not None and rope.scaling.kind != "longrope":
        raise UnsupportedModel(f"rope scaling {rope.scaling.kind!r}: only longrope is supported for Phi-3")
    return {"rope": rope, "attention_scale": head_dim**-0.5, **_same_window(fields)}


def _gemma(fields: Fields) -> Parts:
    return {
        **_biases(fields),
        "attention_scale": number(fields, "query_pre_attn_scalar") ** -0.5,
        "activation": "gelu_tanh",
        "post_norms": True,
        "embedding_scale": integer(fields, "hidden_size") ** 0.5,
        "attention_softcap": number(fields, "attn_logit_softcapping", 0.0),
        "logit_softcap": number(fields, "final_logit_softcapping", 0.0),
    }


def _gemma2(fields: Fields, head_dim: int) -> Parts:
    sliding = [layer % 2 == 0 for layer in range(integer(fields, "num_hidden_layers"))]
    rope = whole_heads(parse_rope(fields, head_dim), head_dim)
    return {**_gemma(fields), **_layer_windows(fields, sliding), "rope": rope}


def _gemma3(fields: Fields, head_dim: int) -> Parts:
    pattern = integer(fields, "sliding_window_pattern", integer(fields, "_sliding_window_pattern", 6))
    sliding = [(layer + 1) % pattern != 0 for layer in range(integer(fields, "num_hidden_layers"))]
    rope, local = (whole_heads(one, head_dim) for one in gemma3_ropes(fields, head_dim))
    windows = _layer_windows(fields, sliding)
    return {**_gemma(fields), **windows, "rope": rope, "rope_local": local if windows else None, "qk_norm": True}


_SILU: dict[str, tuple[object, ...]] = {"hidden_act": ("silu", "swish")}
_GELU = ("gelu_pytorch_tanh",)
_GEMMA_ONLY: dict[str, tuple[object, ...]] = {
    "hidden_act": _GELU,
    "hidden_activation": _GELU,
    "use_bidirectional_attention": (False,),
}
_GEMMA_READS = frozenset(
    (
        "attention_bias",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "sliding_window",
        "layer_types",
        "cache_implementation",
    )
)
_GEMMA_DEFAULTS: dict[str, object] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rms_norm_eps": 1e-6,
}
_QWEN_WINDOW = frozenset(("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"))
# Of training, and of the balance between experts there.
_MOE_READS = frozenset(
    (
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "output_router_logits",
    )
)

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "llama",
        "LlamaForCausalLM",
        _llama,
        reads=frozenset(("attention_bias",)),
        only={**_SILU, "pretraining_tp": (1,), "mlp_bias": (False,), "rope_interleaved": (False,)},
        defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    ),
    "mistral": Family(
        "mistral",
        "MistralForCausalLM",
        _mistral,
        reads=frozenset(("sliding_window",)),
        only=_SILU,
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    ),
    "qwen2": Family(
        "qwen2",
        "Qwen2ForCausalLM",
        _qwen2,
        reads=_QWEN_WINDOW,
        only=_SILU,
        defaults={
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
    ),
    "qwen3": Family(
        "qwen3",
        "Qwen3ForCausalLM",
        _qwen3,
        reads=_QWEN_WINDOW | {"attention_bias"},
        only=_SILU,
        defaults={
            "head_dim": 128,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
    ),
    "qwen3_moe": Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _qwen3_moe,
        reads=_MOE_READS
        | {
            "attention_bias",
            "sliding_window",
            "max_window_layers",
            "decoder_sparse_step",
            "mlp_only_layers",
            "moe_intermediate_size",
            "norm_topk_prob",
        },
        only={**_SILU, "use_sliding_window": (False,)},
        defaults={"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768},
    ),
    "mixtral": Family(
        "mixtral",
        "MixtralForCausalLM",
        _mixtral,
        reads=_MOE_READS | {"sliding_window"},
        only=_SILU,
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "rope_theta": 1e6,
        },
    ),
    "phi3": Family(
        "phi3",
        "Phi3ForCausalLM",
        _phi3,
        reads=frozenset(
            ("sliding_window", "original_max_position_embeddings", "partial_rotary_factor", "resid_pdrop", "embd_pdrop")
        ),
        only={**_SILU, "attention_bias": (False,), "mlp_bias": (False,)},
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
    ),
    "gemma2": Family(
        "gemma2",
        "Gemma2ForCausalLM",
        _gemma2,
        reads=_GEMMA_READS,
        only=_GEMMA_ONLY,
        defaults={
            **_GEMMA_DEFAULTS,
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3_text": Family(
        "gemma3",
        "Gemma3ForCausalLM",
        _gemma3,
        reads=_GEMMA_READS | {"sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq"},
        only=_GEMMA_ONLY,
        defaults={**_GEMMA_DEFAULTS, "vocab_size": 262208, "max_position_embeddings": 131072},
    ),
}
