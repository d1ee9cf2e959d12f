"""Tensors of a GGUF file under Hugging Face's names, dequantised, with llama.cpp's row order undone.

For the architecture llama, llama.cpp stores query and key rows so that rotary embedding turns neighbouring elements;
here element i of a head turns with i + head_dim / 2, so within each head the even rows come first and the odd rows
after them. Other architectures keep the order of their authors.
"""

from __future__ import annotations

import re

import torch

from services.worker.model.config import ModelConfig
from services.worker.model.gguf_fields import ROPE_TENSORS
from services.worker.model.gguf_file import GgufFile

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
# Stacked over the experts, and without a suffix in Hugging Face's scheme.
_EXPERT_NAMES = {
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_POST_NORM_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GgufSource:
    """A TensorSource over one GGUF file, whose writer has added the one to Gemma's norms."""

    centred_norms = False

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        names = layer_names_of(config)
        self._tensors = {
            hugging_face_name(name, names): tensor for name, tensor in file.tensors.items() if name not in ROPE_TENSORS
        }
        self._config = config

    def names(self) -> set[str]:
        return set(self._tensors)

    def read(self, name: str) -> torch.Tensor:
        values = torch.from_numpy(self._tensors[name].dequantise())
        if self._config.architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            return half_split_rows(values, self._config.head_dim)
        return values


def half_split_rows(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """rows [heads * head_dim, ...] with rotary pairs side by side become rows with the halves of a head apart."""
    if len(rows) % head_dim:
        return rows
    pairs = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def layer_names_of(config: ModelConfig) -> dict[str, str]:
    """What the tensors of a layer are called; Phi-3's are joined, Gemma has norms after its layers too."""
    names = dict(_LAYER_NAMES)
    if config.post_norms:
        names.update(_POST_NORM_NAMES)
    if config.architecture == "phi3":
        names["ffn_up"] = "mlp.gate_up_proj"
    return names


def hugging_face_name(name: str, layer_names: dict[str, str]) -> str:
    """The name in Hugging Face's scheme; unknown names stay, and are refused as left over."""
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match[2] in _EXPERT_NAMES and match[3] == "weight":
        return f"model.layers.{match[1]}.{_EXPERT_NAMES[match[2]]}"
    if match and match[2] in layer_names:
        return f"model.layers.{match[1]}.{layer_names[match[2]]}.{match[3]}"
    return _GLOBAL_NAMES.get(name, name)
