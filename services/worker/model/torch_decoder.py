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
from services.worker.model.seam import Seam
from services.worker.model.torch_adapters import TorchAdapters
from services.worker.model.weights import ExpertWeights, LayerWeights, MlpWeights, ModelWeights, embedding_scale


class TorchDecoder:
    """A Decoder without compiled code."""

    backend = "torch"

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        pool: KvPool,
        num_positions: int,
        adapter_slots: int = 0,
        seam: Seam | None = None,
    ) -> None:
        """seam: of a rank of a group, whose part the other arguments are."""
        self.adapters = TorchAdapters(adapter_slots)
        self._config = config
        self._seam = seam
        self._weights = weights
        self.pool = pool.blocks
        self._embedding_scale = embedding_scale(config, self.pool.dtype)
        ropes = [config.layer_rope(index) for index in range(config.num_layers)]
        tables = {rope: rotary_tables(rope, num_positions) for rope in set(ropes)}
        self._rotary = [tables[rope] for rope in ropes]
        self._hidden = torch.empty(0)

    @torch.inference_mode()
    def forward(self, batch: PagedBatch, num_threads: int) -> torch.Tensor:
        """See Decoder."""
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        x = self._entered(batch)
        for index, layer in enumerate(self._weights.layers):
            attended = self._summed(self._attention(x, index, layer, batch))
            x = x + self._post_norm(attended, layer.attention_post_norm)
            x = x + self._post_norm(self._summed(self._mlp(x, index, layer, batch)), layer.mlp_post_norm)
        if self._seam is not None and not self._seam.is_last:
            self._seam.send(x)
            return x.new_empty(len(batch.logit_rows), 0)
        rows = x[torch.from_numpy(batch.logit_rows).long()]
        self._hidden = self._norm(rows, self._weights.final_norm)
        logits = linear(self._hidden, self._weights.head)
        cap = self._config.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def hidden(self) -> torch.Tensor:
        """See Decoder."""
        return self._hidden.float()

    def _entered(self, batch: PagedBatch) -> torch.Tensor:
        """The residual stream before the first layer."""
        tokens, table, seam = torch.from_numpy(batch.token_ids).long(), self._weights.embedding, self._seam
        if seam is None:
            return table[tokens].float() * self._embedding_scale
        if not seam.is_first:
            received = torch.empty(len(tokens), self._config.hidden_size)
            seam.receive(received)
            return received
        rows = tokens - seam.first_token
        here = (rows >= 0) & (rows < len(table))
        embedded = table[rows.clamp(0, len(table) - 1)].float() * self._embedding_scale
        return self._summed(embedded * here[:, None])

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        if self._seam is not None and self._seam.sums:
            self._seam.sum(x)
        return x

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, eps=self._config.rms_norm_eps, dtype=self.pool.dtype)

    def _post_norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else rms_norm(x, weight, eps=self._config.rms_norm_eps, dtype=torch.float32)

    def _attention(self, x: torch.Tensor, index: int, layer: LayerWeights, batch: PagedBatch) -> torch.Tensor:
        config, (cos, sin) = self._config, self._rotary[index]
        normed = self._norm(x, layer.attention_norm)
        qkv = linear(normed, layer.qkv, layer.qkv_bias)
        keys = config.num_heads * config.head_dim
        values = keys + config.num_kv_heads * config.head_dim
        for name, part in (("q", qkv[:, :keys]), ("k", qkv[:, keys:values]), ("v", qkv[:, values:])):
            self._adapt(part, normed, index, name, batch)
        query = rotary_write(
            qkv,
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
        output = linear(attended.flatten(1), layer.output, layer.output_bias)
        self._adapt(output, attended.flatten(1), index, "o", batch)
        return output

    def _adapt(self, out: torch.Tensor, x: torch.Tensor, index: int, name: str, batch: PagedBatch) -> None:
        """Add to a projection's output what the batch's adapters make of its input."""
        self.adapters.add(out, x, index, name, batch.token_adapters)

    def _mlp(self, x: torch.Tensor, index: int, layer: LayerWeights, batch: PagedBatch) -> torch.Tensor:
        normed = self._norm(x, layer.mlp_norm)
        if isinstance(layer.mlp, ExpertWeights):
            return self._experts(normed, layer.mlp)
        return self._dense(normed, index, layer.mlp, batch)

    def _dense(self, normed: torch.Tensor, index: int, mlp: MlpWeights, batch: PagedBatch) -> torch.Tensor:
        gate, up = linear(normed, mlp.gate), linear(normed, mlp.up)
        self._adapt(gate, normed, index, "gate", batch)
        self._adapt(up, normed, index, "up", batch)
        hidden = gated_multiply(gate, up, self._config.activation).to(self.pool.dtype)
        output = linear(hidden, mlp.down)
        self._adapt(output, hidden, index, "down", batch)
        return output

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
            first=moe.first_held,
        )
