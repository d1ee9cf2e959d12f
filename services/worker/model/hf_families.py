"""What each model family reads in a config.json, and what it means: one entry of `FAMILIES` each.

A family states the fields it reads beyond those of all, the values that stand where its authors leave one out (as
transformers takes them), the values that are the only ones implemented, and how the rest of a ModelConfig follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from services.worker.model import hf_parts
from services.worker.model.hf_fields import Fields
from services.worker.model.hf_parts import Parts


@dataclass(frozen=True)
class Family:
    """architecture: the name here. class_name: of transformers. build: fields and head_dim to parts of ModelConfig."""

    architecture: str
    class_name: str
    build: Callable[[Fields, int], Parts]
    reads: frozenset[str] = frozenset()
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)


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
        hf_parts.llama,
        reads=frozenset(("attention_bias",)),
        only={**_SILU, "pretraining_tp": (1,), "mlp_bias": (False,), "rope_interleaved": (False,)},
        defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    ),
    "mistral": Family(
        "mistral",
        "MistralForCausalLM",
        hf_parts.mistral,
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
        hf_parts.qwen2,
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
        hf_parts.qwen3,
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
        hf_parts.qwen3_moe,
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
        hf_parts.mixtral,
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
        hf_parts.phi3,
        reads=frozenset(
            ("sliding_window", "original_max_position_embeddings", "partial_rotary_factor", "resid_pdrop", "embd_pdrop")
        ),
        only={
            **_SILU,
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "full_attn_mod": (1,),
            "interpolate_factor": (1,),
        },
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
    ),
    "gemma2": Family(
        "gemma2",
        "Gemma2ForCausalLM",
        hf_parts.gemma2,
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
        hf_parts.gemma3,
        reads=_GEMMA_READS | {"sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq"},
        only=_GEMMA_ONLY,
        defaults={**_GEMMA_DEFAULTS, "vocab_size": 262208, "max_position_embeddings": 131072},
    ),
}
