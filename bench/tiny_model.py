"""A Llama of a few million random parameters, with the default model's tokenizer, for meshes that are to start soon.

Its answers are nonsense that depends on every token before, and each step takes next to nothing: what is left is what
the mesh itself does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from services.common.models import DEFAULT_MODEL, resolve_model
from services.common.text.gguf_tokenizer import load_gguf_tokenizer

_HIDDEN, _INNER, _LAYERS, _HEADS, _KV_HEADS, _CONTEXT = 64, 128, 2, 4, 2, 4096
_SEED = 7
# Wide enough that attention matters for which token comes next.
_STD = 0.3


def write_tiny_model(folder: Path) -> Path:
    """A Hugging Face folder, the same on every call; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, _ = load_gguf_tokenizer(resolve_model(DEFAULT_MODEL).path)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = _config(tokenizer.get_vocab_size(with_added_tokens=True))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    save_file(_weights(config["vocab_size"]), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _config(vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": _LAYERS,
        "hidden_size": _HIDDEN,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "intermediate_size": _INNER,
        "vocab_size": vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": _CONTEXT,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def _weights(vocab_size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(_SEED)

    def random(*shape: int) -> torch.Tensor:
        return torch.empty(shape).normal_(std=_STD, generator=generator).bfloat16()

    head = _HIDDEN // _HEADS
    tensors = {"model.embed_tokens.weight": random(vocab_size, _HIDDEN), "model.norm.weight": torch.ones(_HIDDEN)}
    for number in range(_LAYERS):
        layer = f"model.layers.{number}"
        shapes = {
            "self_attn.q_proj": (_HIDDEN, _HIDDEN),
            "self_attn.k_proj": (_KV_HEADS * head, _HIDDEN),
            "self_attn.v_proj": (_KV_HEADS * head, _HIDDEN),
            "self_attn.o_proj": (_HIDDEN, _HIDDEN),
            "mlp.gate_proj": (_INNER, _HIDDEN),
            "mlp.up_proj": (_INNER, _HIDDEN),
            "mlp.down_proj": (_HIDDEN, _INNER),
        }
        tensors |= {f"{layer}.{name}.weight": random(*shape) for name, shape in shapes.items()}
        tensors |= {f"{layer}.{name}.weight": torch.ones(_HIDDEN) for name in _NORMS}
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


_NORMS = ("input_layernorm", "post_attention_layernorm")
