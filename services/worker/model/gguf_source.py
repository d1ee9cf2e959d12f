"""Tensors of a GGUF file under Hugging Face's names, dequantised, with llama.cpp's row order undone.

llama.cpp stores query and key rows so that rotary embedding turns neighbouring elements; here element i of a head turns
with i + head_dim / 2, so within each head the even rows come first and the odd rows after them.
"""

from __future__ import annotations

import re

import torch

from services.worker.model.config import ModelConfig
from services.worker.model.gguf_config import ROPE_FACTORS
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
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GgufSource:
    """A TensorSource over one GGUF file."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._tensors = {
            _hugging_face_name(name): tensor for name, tensor in file.tensors.items() if name != ROPE_FACTORS
        }
        self._config = config

    def names(self) -> set[str]:
        return set(self._tensors)

    def read(self, name: str) -> torch.Tensor:
        values = torch.from_numpy(self._tensors[name].dequantise())
        if ".q_proj." in name or ".k_proj." in name:
            return half_split_rows(values, self._config.head_dim)
        return values


def half_split_rows(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """rows [heads * head_dim, ...] with rotary pairs side by side become rows with the halves of a head apart."""
    if len(rows) % head_dim:
        return rows
    pairs = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _hugging_face_name(name: str) -> str:
    """The name in Hugging Face's scheme; unknown names stay, and are refused as left over."""
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return _GLOBAL_NAMES.get(name, name)
