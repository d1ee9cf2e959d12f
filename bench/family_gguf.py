"""Write a family's small model as a GGUF file, by the conventions of llama.cpp's converter.

Written from those conventions and not from this repository's reader, so that one checks the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
_GLOBAL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
}
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(model: Any, path: Path, *, quantisation: gguf.GGMLQuantizationType | None = None) -> Path:
    """Write a transformers model of one of the families; returns the path.

    quantisation: of all tensors with rows that it can hold; None: float32.
    """
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    _write_shape(writer, config)
    _write_rope(writer, config)
    _write_special(writer, config, architecture)
    for name, tensor in _tensors(model, config, architecture):
        values = np.ascontiguousarray(tensor.detach().float().numpy())
        if quantisation is None or values.ndim == 1 or values.shape[-1] % gguf.GGML_QUANT_SIZES[quantisation][0]:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, quantisation), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _head_dim(config: Any) -> int:
    stated: int | None = getattr(config, "head_dim", None)
    return stated or config.hidden_size // config.num_attention_heads


def _write_shape(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)


def _write_rope(writer: gguf.GGUFWriter, config: Any) -> None:
    parameters = config.rope_parameters
    local = parameters.get("sliding_attention")
    if local is not None:
        writer.add_rope_freq_base_swa(local["rope_theta"])
        parameters = parameters["full_attention"]
    writer.add_rope_freq_base(parameters["rope_theta"])
    writer.add_rope_dimension_count(int(_head_dim(config) * parameters.get("partial_rotary_factor", 1.0)))
    kind = parameters["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(parameters["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(parameters["original_max_position_embeddings"])
    if kind == "longrope":
        original = config.original_max_position_embeddings
        scale = config.max_position_embeddings / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))


def _write_special(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    experts = getattr(config, "num_local_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture == "qwen3moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config.sliding_window or 0)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if architecture in ("gemma2", "gemma3") and config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _tensors(model: Any, config: Any, architecture: str) -> Iterator[tuple[str, torch.Tensor]]:
    names = {**_LAYER, **(_GEMMA if architecture.startswith("gemma") else {})}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensor = value + 1 if architecture.startswith("gemma") and name.endswith("norm.weight") else value
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            tensor = _pairs_beside_each_other(tensor, _head_dim(config))
        if ".experts." in name:
            yield from _experts(name, tensor)
            continue
        stem, kind = name.rsplit(".", 1)
        if stem in _GLOBAL:
            yield f"{_GLOBAL[stem]}.{kind}", tensor
        else:
            _, _, layer, inner = stem.split(".", 3)
            yield f"blk.{layer}.{names[inner]}.{kind}", tensor
    yield from _rope_tensors(config)


def _experts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    layer = name.split(".")[2]
    if name.endswith("down_proj"):
        yield f"blk.{layer}.ffn_down_exps.weight", tensor
        return
    for kind, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
        yield f"blk.{layer}.ffn_{kind}_exps.weight", half


def _pairs_beside_each_other(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """llama.cpp turns neighbouring elements of a head for this architecture, transformers its halves."""
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def _rope_tensors(config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    parameters = config.rope_parameters
    if parameters.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", torch.tensor(parameters["long_factor"])
        yield "rope_factors_short.weight", torch.tensor(parameters["short_factor"])
    if parameters.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_divisors(parameters, _head_dim(config))


def _llama3_divisors(parameters: dict[str, Any], head_dim: int) -> torch.Tensor:
    frequencies = parameters["rope_theta"] ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    length, factor = parameters["original_max_position_embeddings"], parameters["factor"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    divisors = []
    for wavelength in (2 * math.pi / frequencies).tolist():
        smooth = (length / wavelength - low) / (high - low)
        if wavelength < length / high:
            divisors.append(1.0)
        elif wavelength > length / low:
            divisors.append(factor)
        else:
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(divisors)
