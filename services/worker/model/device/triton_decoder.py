"""The decoder of every model family on a device: Triton kernels between matrix products (linear_layers.py).

A step is a fixed sequence of launches that depends on the shape of its arrays alone and never waits for the device, so
it can be captured in a CUDA graph. The residual stream is float32, what feeds a product is rounded to the compute
dtype, as in TorchDecoder, with which it is compared. The same code runs on CPU tensors in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.batch import PagedBatch
from kernels.triton.activation import gated
from kernels.triton.device_batch import DeviceBatch
from kernels.triton.moe import mixture
from kernels.triton.paged_attention import paged_attention
from kernels.triton.rms_norm import add_rms_norm, rms_norm
from kernels.triton.rotary_write import rotary_write
from services.worker.model.config import ModelConfig
from services.worker.model.device.linear_layers import LinearLayer, make_layer
from services.worker.model.kv_pool import KvPool
from services.worker.model.layout import DeviceWeightDtype
from services.worker.model.rope import rotary_tables
from services.worker.model.weights import ExpertWeights, LayerWeights, ModelWeights, embedding_scale


@dataclass(frozen=True, slots=True)
class _Experts:
    router: LinearLayer
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: LinearLayer
    output: LinearLayer
    mlp_norm: torch.Tensor
    gate_up: LinearLayer | None
    down: LinearLayer | None
    experts: _Experts | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    attention_post_norm: torch.Tensor | None
    mlp_post_norm: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor


class TritonDecoder:
    """A Decoder on the device of its pool.

    weight_dtype: of linear layers; router, experts, embedding and head stay as stored. The pool may be another
    one later (`use_pool`): the largest step is measured over a small one first.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        pool: KvPool,
        num_positions: int,
        *,
        exact: bool,
        weight_dtype: DeviceWeightDtype = "dtype",
    ) -> None:
        self.backend = f"triton {pool.blocks.device.type}{' exact' if exact else ''}"
        self._config = config
        self._exact = exact
        self._device = pool.blocks.device
        self._dtype = weights.embedding.dtype
        self.use_pool(pool)
        ropes = [config.layer_rope(index) for index in range(config.num_layers)]
        tables = {rope: tuple(self._move(table) for table in rotary_tables(rope, num_positions)) for rope in set(ropes)}
        self._embedding = self._move(weights.embedding)
        self._embedding_scale = embedding_scale(config, self._dtype)
        self._layers = [
            self._layer(layer, weight_dtype, *tables[rope]) for layer, rope in zip(weights.layers, ropes, strict=True)
        ]
        self._final_norm = self._move(weights.final_norm)
        tied = weights.head is weights.embedding
        self._head = make_layer(self._embedding if tied else self._move(weights.head), None, "dtype", exact=exact)

    @property
    def pool(self) -> torch.Tensor:
        """See Decoder."""
        return self._pool

    @property
    def streamed_bytes(self) -> int:
        """Bytes of weights that a step reads in any case: all linear layers, the head among them."""
        layers: list[LinearLayer | None] = [self._head]
        for layer in self._layers:
            layers += (layer.qkv, layer.output, layer.gate_up, layer.down)
        return sum(tensor.nbytes for layer in layers if layer is not None for tensor in layer.tensors)

    def use_pool(self, pool: KvPool) -> None:
        """Keep the KV there from now on. Steps that were captured keep to the pool before."""
        self._pool, self._scales = pool.blocks, pool.scales

    def forward(self, batch: PagedBatch, num_threads: int) -> torch.Tensor:
        """See Decoder; num_threads says nothing here."""
        return self.run(DeviceBatch.from_batch(batch, self._device)).cpu()

    @torch.inference_mode()
    def run(self, batch: DeviceBatch) -> torch.Tensor:
        """Write the KV of the batch's tokens to the pool; float32 logits [L, vocab_size] on the device."""
        eps = self._config.rms_norm_eps
        residual = self._embedding[batch.token_ids].float().mul_(self._embedding_scale)
        x: torch.Tensor | None = None
        post_norm: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            if x is None:
                normed = rms_norm(residual, layer.attention_norm, eps=eps, dtype=self._dtype)
            else:
                normed = self._add_norm(x, residual, layer.attention_norm, post_norm)
            x = self._attention(normed, index, layer, batch)
            normed = self._add_norm(x, residual, layer.mlp_norm, layer.attention_post_norm)
            x = self._mlp(normed, layer)
            post_norm = layer.mlp_post_norm
        assert x is not None, "a model has layers"
        normed = self._add_norm(x[batch.logit_rows], residual[batch.logit_rows], self._final_norm, post_norm)
        logits = self._head(normed).float()
        cap = self._config.logit_softcap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def _add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, post_weight: torch.Tensor | None
    ) -> torch.Tensor:
        eps = self._config.rms_norm_eps
        return add_rms_norm(x, residual, weight, eps=eps, dtype=self._dtype, post_weight=post_weight)

    def _attention(self, x: torch.Tensor, index: int, layer: _Layer, batch: DeviceBatch) -> torch.Tensor:
        config = self._config
        query = rotary_write(
            layer.qkv(x),
            batch,
            heads=config.num_heads,
            cos=layer.cos,
            sin=layer.sin,
            pool=self._pool,
            layer=index,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=config.rms_norm_eps,
            kv_scales=self._scales,
            query_dtype=self._dtype,
        )
        attended = paged_attention(
            query,
            self._pool,
            index,
            batch,
            scale=config.attention_scale,
            window=config.window(index),
            softcap=config.attention_softcap,
            exact=self._exact,
            kv_scales=self._scales,
        )
        return layer.output(attended.flatten(1))

    def _mlp(self, x: torch.Tensor, layer: _Layer) -> torch.Tensor:
        config = self._config
        if layer.experts is not None:
            assert config.moe is not None
            return mixture(
                x,
                layer.experts.router(x),
                layer.experts.gate_up,
                layer.experts.down,
                k=config.moe.experts_per_token,
                renormalise=config.moe.renormalise,
                activation=config.activation,
                exact=self._exact,
            )
        assert layer.gate_up is not None
        assert layer.down is not None
        return layer.down(gated(layer.gate_up(x), config.activation, dtype=self._dtype))

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device)

    def _move_if(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else self._move(tensor)

    def _layer(
        self, layer: LayerWeights, weight_dtype: DeviceWeightDtype, cos: torch.Tensor, sin: torch.Tensor
    ) -> _Layer:
        def make(weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearLayer:
            return make_layer(self._move(weight), self._move_if(bias), weight_dtype, exact=self._exact)

        mlp, experts, gate_up, down = layer.mlp, None, None, None
        if isinstance(mlp, ExpertWeights):
            router = make_layer(self._move(mlp.router), None, "dtype", exact=self._exact)
            experts = _Experts(router, self._move(mlp.gate_up), self._move(mlp.down))
        else:
            gate_up, down = make(torch.cat((mlp.gate, mlp.up))), make(mlp.down)
        return _Layer(
            attention_norm=self._move(layer.attention_norm),
            qkv=make(layer.qkv, layer.qkv_bias),
            output=make(layer.output, layer.output_bias),
            mlp_norm=self._move(layer.mlp_norm),
            gate_up=gate_up,
            down=down,
            experts=experts,
            q_norm=self._move_if(layer.q_norm),
            k_norm=self._move_if(layer.k_norm),
            attention_post_norm=self._move_if(layer.attention_post_norm),
            mlp_post_norm=self._move_if(layer.mlp_post_norm),
            cos=cos,
            sin=sin,
        )
