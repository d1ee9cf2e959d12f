"""One small model of each family with random weights, made by `transformers`: what others are compared with.

Every tensor is random, norms and biases too, so that no part can be left out unseen. Windows, scalings and caps are
small enough to matter within a context of 200 tokens.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 128
# Of every family unless its entry says otherwise.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.05 * pair for pair in range(6)],
    "long_factor": [1.0 + 0.9 * pair for pair in range(6)],
    "original_max_position_embeddings": 64,
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
# name -> (prefix of the class in transformers, fields of its config)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 40, "head_dim": 32}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 32,
            "sliding_window": 40,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 32,
            "sliding_window": 40,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": GEMMA3_ROPE,
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 40}),
    "phi3-longrope": (
        "Phi3",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75},
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 40}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
}


def make_model(name: str, **changes: Any) -> torch.nn.Module:
    """The family's small model in float32, the same weights on every call; `changes` replace fields of its config."""
    prefix, fields = MODELS[name]
    config = getattr(transformers, f"{prefix}Config")(**{**SHAPE, **fields, **changes})
    config._attn_implementation = "eager"
    model_class = getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")
    torch.manual_seed(5)
    with quiet():
        model: Any = model_class(config)
    centred = prefix.startswith("Gemma")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("norm.weight"):
                parameter.uniform_(-0.4, 0.4) if centred else parameter.uniform_(0.6, 1.4)
            else:
                parameter.normal_(std=0.2)
    module: torch.nn.Module = model.eval()
    return module


def save_model(model: Any, folder: Path, *, shard_size: str = "5GB") -> Path:
    """Write config.json and safetensors; returns the folder."""
    with quiet():
        model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the library's warnings about unusual configurations and its progress bars."""
    logging: Any = transformers.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
