"""ModelConfig from GGUF metadata, with what llama.cpp takes for granted where the file is silent.

GGUF names fewer things than config.json: Gemma's attention scale follows from its size, the pattern of its windows from
its architecture, a mixture's shares are always made to sum to one. Fields that are neither read nor known to be without
influence refuse the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.worker.model.config import ModelConfig, MoeConfig, RopeConfig
from services.worker.model.errors import UnsupportedModel
from services.worker.model.gguf_fields import GgufFields
from services.worker.model.gguf_file import GgufFile
from services.worker.model.hf_fields import shown
from services.worker.model.rope import extended_positions

Parts = dict[str, Any]
_READ = frozenset(
    (
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.freq_base",
        "rope.dimension_count",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_ext_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "vocab_size",
    )
)
# Written by older converters, or of a scaling that is not in use: no influence on the result.
_IGNORED = frozenset(("rope.scaling.finetuned", "tensor_data_layout"))
_MOE = frozenset(
    ("expert_count", "expert_used_count", "expert_feed_forward_length", "expert_weights_norm", "expert_gating_func")
)
_WINDOWS = frozenset(("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"))
_SOFTCAPS = frozenset(("attn_logit_softcapping", "final_logit_softcapping"))
_SOFTMAX_GATING = 1


@dataclass(frozen=True, slots=True)
class _Architecture:
    """name: as Hugging Face folders of the family have it here. build: fields and head_dim to parts of ModelConfig."""

    name: str
    build: Callable[[GgufFields, int], Parts]
    reads: frozenset[str] = frozenset()


def parse_gguf_config(file: GgufFile) -> ModelConfig:
    """The configuration of a GGUF model. Raises UnsupportedModel naming what cannot be executed."""
    stated = file.metadata.get("general.architecture")
    architecture = _ARCHITECTURES.get(stated) if isinstance(stated, str) else None
    if architecture is None:
        raise UnsupportedModel(f"architecture {shown(stated)}: of GGUF files {', '.join(_ARCHITECTURES)} are supported")
    parts_of_file = file.metadata.get("split.count", 1)
    if parts_of_file not in (0, 1):
        raise UnsupportedModel(f"GGUF field split.count = {shown(parts_of_file)}: only whole files are supported")
    fields = GgufFields(file, str(stated))
    fields.refuse_unknown(_READ | _IGNORED | architecture.reads)
    heads, hidden = fields.positive_integer("attention.head_count"), fields.positive_integer("embedding_length")
    head_dim = fields.positive_integer("attention.key_length", hidden // heads)
    value_dim = fields.integer("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise UnsupportedModel(
            f"GGUF field {fields.prefix}attention.value_length = {value_dim}: only {head_dim} is supported"
        )
    parts = {"rope": fields.rope(head_dim), "attention_scale": head_dim**-0.5, **architecture.build(fields, head_dim)}
    return ModelConfig(
        architecture=architecture.name,
        num_layers=fields.num_layers(),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("feed_forward_length"),
        vocab_size=_vocab_size(fields),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon", 1e-5),
        max_positions=extended_positions(fields.integer("context_length"), parts["rope"]),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        **parts,
    )


def _vocab_size(fields: GgufFields) -> int:
    embedding = fields.file.tensors.get("token_embd.weight")
    return embedding.shape[0] if embedding else fields.integer("vocab_size")


def _whole_heads(fields: GgufFields, head_dim: int) -> None:
    rotary_dim = fields.integer("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        raise UnsupportedModel(
            f"GGUF field {fields.prefix}rope.dimension_count = {rotary_dim}: only {head_dim} is supported"
        )


def _llama(fields: GgufFields, head_dim: int) -> Parts:
    _whole_heads(fields, head_dim)
    return _moe(fields) if fields.values.get("expert_count") else {}


def _qwen2(fields: GgufFields, head_dim: int) -> Parts:
    _whole_heads(fields, head_dim)
    return {}


def _qwen3(fields: GgufFields, head_dim: int) -> Parts:
    _whole_heads(fields, head_dim)
    return {"qk_norm": True}


def _qwen3_moe(fields: GgufFields, head_dim: int) -> Parts:
    _whole_heads(fields, head_dim)
    return {"qk_norm": True, **_moe(fields)}


def _moe(fields: GgufFields) -> Parts:
    gating = fields.integer("expert_gating_func", _SOFTMAX_GATING)
    if gating != _SOFTMAX_GATING:
        raise UnsupportedModel(f"GGUF field {fields.prefix}expert_gating_func = {gating}: only softmax is supported")
    layers = range(fields.num_layers())
    return {
        "moe": MoeConfig(
            num_experts=fields.integer("expert_count"),
            experts_per_token=fields.integer("expert_used_count"),
            intermediate_size=fields.integer("expert_feed_forward_length", fields.integer("feed_forward_length")),
            renormalise=bool(fields.values.get("expert_weights_norm", True)),
            sparse=tuple(f"blk.{layer}.ffn_gate_inp.weight" in fields.file.tensors for layer in layers),
        )
    }


def _phi3(fields: GgufFields, head_dim: int) -> Parts:
    window = fields.integer("attention.sliding_window", 0)
    return {"windows": (window,) * fields.num_layers()} if window else {}


def _gemma2(fields: GgufFields, head_dim: int) -> Parts:
    return {
        **_gemma(fields, head_dim, big=46),
        **_windows(fields, period=2, window=4096, local=None),
        "attention_softcap": fields.number("attn_logit_softcapping", 50.0),
        "logit_softcap": fields.number("final_logit_softcapping", 30.0),
    }


def _gemma3(fields: GgufFields, head_dim: int) -> Parts:
    local = RopeConfig(fields.number("rope.freq_base_swa", 1e4), head_dim)
    return {
        **_gemma(fields, head_dim, big=62),
        **_windows(fields, period=6, window=0, local=local),
        "logit_softcap": fields.number("final_logit_softcapping", 0.0),
        "qk_norm": True,
    }


def _gemma(fields: GgufFields, head_dim: int, big: int) -> Parts:
    """big: layers of the largest model, which scales scores by the hidden size of a head instead of head_dim."""
    _whole_heads(fields, head_dim)
    hidden = fields.integer("embedding_length")
    is_big = fields.num_layers() == big
    return {
        "attention_scale": (hidden // fields.integer("attention.head_count") if is_big else head_dim) ** -0.5,
        "activation": "gelu_tanh",
        "post_norms": True,
        "embedding_scale": hidden**0.5,
    }


def _windows(fields: GgufFields, *, period: int, window: int, local: RopeConfig | None) -> Parts:
    """Every `period`th layer sees all, the others the latest `window`; unless the file says otherwise."""
    layers, window = fields.num_layers(), fields.integer("attention.sliding_window", window)
    pattern = fields.values.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, int) and pattern > 0:
        slides = [(layer + 1) % pattern != 0 for layer in range(layers)]
    elif isinstance(pattern, list) and len(pattern) == layers:
        slides = [bool(value) for value in pattern]
    else:
        raise UnsupportedModel(
            f"GGUF field {fields.prefix}attention.sliding_window_pattern = {shown(pattern)} is not supported"
        )
    if not window or not any(slides):
        return {}
    return {"windows": tuple(window if slide else 0 for slide in slides), "rope_local": local}


_ARCHITECTURES = {
    "llama": _Architecture("llama", _llama, _MOE),
    "qwen2": _Architecture("qwen2", _qwen2),
    "qwen3": _Architecture("qwen3", _qwen3),
    "qwen3moe": _Architecture("qwen3_moe", _qwen3_moe, _MOE),
    "phi3": _Architecture("phi3", _phi3, frozenset(("attention.sliding_window",))),
    "gemma2": _Architecture(
        "gemma2", _gemma2, frozenset(("attention.sliding_window", "attention.sliding_window_pattern")) | _SOFTCAPS
    ),
    "gemma3": _Architecture("gemma3", _gemma3, _WINDOWS | {"final_logit_softcapping"}),
}
