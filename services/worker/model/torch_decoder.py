"""The decoder of every model family in plain torch, composed of the kernels' references: specification and fallback.

The residual stream is float32; what feeds a matrix product is rounded to the compute dtype. Every step is row by row,
so results do not depend on the batch (kernels/linear.py says how the products keep to that).
"""

from __future__ import annotations

import torch

from kernels.activation import gated_multiply
from kernels.batch import PagedBatch
from kernels.linear import linear
from kernels.moe import mixture
from kernels.paged_attention import paged_attention
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary_write
from services.worker.model.config import ModelConfig
from services.worker.model.kv_pool import KvPool
from services.worker.model.rope import rotary_tables
from services.worker.model.weights import ExpertWeights, LayerWeights, MlpWeights, ModelWeights, embedding_scale


class TorchDecoder:
    """A Decoder without compiled code."""

    backend = "torch"

    def __init__(self, config: ModelConfig, weights: ModelWeights, pool: KvPool, num_positions: int) -> None:
        self._config = config
        self._weights = weights
        self.pool = pool.blocks
        self._embedding_scale = embedding_scale(config, self.pool.dtype)
        ropes = [config.layer_rope(index) for index in range(config.num_layers)]
        tables = {rope: rotary_tables(rope, num_positions) for rope in set(ropes)}
        self._rotary = [tables[rope] for rope in ropes]

    @torch.inference_mode()
    def forward(self, batch: PagedBatch, num_threads: int) -> torch.Tensor:
        """See Decoder."""
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        x = self._weights.embedding[torch.from_numpy(batch.token_ids).long()].float() * self._embedding_scale
        for index, layer in enumerate(self._weights.layers):
            x = x + self._post_norm(self._attention(x, index, layer, batch), layer.attention_post_norm)
            x = x + self._post_norm(self._mlp(x, layer), layer.mlp_post_norm)
        rows = x[torch.from_numpy(batch.logit_rows).long()]
        logits = linear(self._norm(rows, self._weights.final_norm), self._weights.head)
        cap = self._config.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, eps=self._config.rms_norm_eps, dtype=self.pool.dtype)

    def _post_norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else rms_norm(x, weight, eps=self._config.rms_norm_eps, dtype=torch.float32)

    def _attention(self, x: torch.Tensor, index: int, layer: LayerWeights, batch: PagedBatch) -> torch.Tensor:
        config, (cos, sin) = self._config, self._rotary[index]
        query = rotary_write(
            linear(self._norm(x, layer.attention_norm), layer.qkv, layer.qkv_bias),
            batch,
            heads=config.num_heads,
            cos=cos,
            sin=sin,
            pool=self.pool,
            layer=index,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=config.rms_norm_eps,
        )
        attended = paged_attention(
            query,
            self.pool,
            index,
            batch,
            scale=config.attention_scale,
            window=config.window(index),
            softcap=config.attention_softcap,
        )
        return linear(attended.flatten(1), layer.output, layer.output_bias)

    def _mlp(self, x: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        normed = self._norm(x, layer.mlp_norm)
        if isinstance(layer.mlp, ExpertWeights):
            return self._experts(normed, layer.mlp)
        return self._dense(normed, layer.mlp)

    def _dense(self, normed: torch.Tensor, mlp: MlpWeights) -> torch.Tensor:
        hidden = gated_multiply(linear(normed, mlp.gate), linear(normed, mlp.up), self._config.activation)
        return linear(hidden.to(self.pool.dtype), mlp.down)

    def _experts(self, normed: torch.Tensor, mlp: ExpertWeights) -> torch.Tensor:
        moe = self._config.moe
        assert moe is not None
        return mixture(
            normed,
            linear(normed, mlp.router),
            mlp.gate_up,
            mlp.down,
            k=moe.experts_per_token,
            renormalise=moe.renormalise,
            activation=self._config.activation,
        )
