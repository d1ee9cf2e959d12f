"""The Llama decoder in plain torch, composed of the kernels' references: the specification and the fallback.

The residual stream is float32; what feeds a matrix product is rounded to the compute dtype. Every step is row by row,
so results do not depend on the batch (kernels/linear.py says how the products keep to that).
"""

from __future__ import annotations

import torch

from kernels.batch import PagedBatch
from kernels.linear import linear, silu_mul
from kernels.paged_attention import paged_attention
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary_table, rotary_write
from services.worker.model.config import ModelConfig
from services.worker.model.kv_pool import KvPool
from services.worker.model.rope import inverse_frequencies
from services.worker.model.weights import LayerWeights, LlamaWeights


class TorchLlama:
    """A Decoder without compiled code."""

    backend = "torch"

    def __init__(self, config: ModelConfig, weights: LlamaWeights, pool: KvPool, num_positions: int) -> None:
        self._config = config
        self._weights = weights
        self.pool = pool.blocks
        self._cos, self._sin = rotary_table(inverse_frequencies(config.rope), num_positions)

    @torch.inference_mode()
    def forward(self, batch: PagedBatch, num_threads: int) -> torch.Tensor:
        """See Decoder."""
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        x = self._weights.embedding[torch.from_numpy(batch.token_ids).long()].float()
        for index, layer in enumerate(self._weights.layers):
            x = x + self._attention(x, index, layer, batch)
            x = x + self._mlp(x, layer)
        rows = x[torch.from_numpy(batch.logit_rows).long()]
        return linear(self._norm(rows, self._weights.final_norm), self._weights.head)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, eps=self._config.rms_norm_eps, dtype=self.pool.dtype)

    def _attention(self, x: torch.Tensor, index: int, layer: LayerWeights, batch: PagedBatch) -> torch.Tensor:
        config = self._config
        qkv = linear(self._norm(x, layer.attention_norm), layer.qkv, layer.qkv_bias)
        query = rotary_write(
            qkv, batch, heads=config.num_heads, cos=self._cos, sin=self._sin, pool=self.pool, layer=index
        )
        attended = paged_attention(query, self.pool, index, batch, scale=config.attention_scale)
        return linear(attended.flatten(1), layer.output, layer.output_bias)

    def _mlp(self, x: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        normed = self._norm(x, layer.mlp_norm)
        activation = silu_mul(linear(normed, layer.gate), linear(normed, layer.up))
        return linear(activation.to(self.pool.dtype), layer.down)
