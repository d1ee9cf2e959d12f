"""The Llama decoder on the compiled CPU kernels: packs the weights once, then one call a step.

Owns every tensor whose address the C structures hold. Scratch memory grows to the largest step seen and stays.
"""

from __future__ import annotations

from ctypes import POINTER, c_double, cast

import torch

from kernels.batch import PagedBatch
from kernels.cpu import library
from kernels.cpu.library import LayerStruct, LinearStruct, ModelStruct, ScratchStruct
from kernels.linear import interleave_gate_up, pack_weight
from services.worker.model.config import ModelConfig
from services.worker.model.kv_pool import KvPool
from services.worker.model.rope import rotary_tables
from services.worker.model.weights import LayerWeights, MlpWeights, ModelWeights


def native_lacks(config: ModelConfig) -> list[str]:
    """The features of a model that the compiled kernels lack; empty when they can execute it."""
    needed = {
        "activation": config.activation != "silu",
        "qk_norm": config.qk_norm,
        "post_norms": config.post_norms,
        "embedding_scale": config.embedding_scale != 1.0,
        "attention_softcap": config.attention_softcap != 0.0,
        "logit_softcap": config.logit_softcap != 0.0,
        "windows": any(config.windows),
        "rope_local": config.rope_local is not None,
        "rotary_dim": config.rope.rotary_dim != config.head_dim,
        "moe": config.moe is not None,
    }
    return [name for name, lacking in needed.items() if lacking]


class NativeLlama:
    """A Decoder on kernels/cpu. Raises BuildError or OSError where the library cannot be had."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, pool: KvPool, num_positions: int) -> None:
        self.backend = f"native {library.instruction_set()}"
        self.part_seconds: torch.Tensor | None = None
        self._config = config
        self.pool = pool.blocks
        self._kept: list[torch.Tensor] = []
        self._layers = (LayerStruct * config.num_layers)(*map(self._layer, weights.layers))
        cos, sin = rotary_tables(config.rope, num_positions)
        self._model = ModelStruct(
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate_size,
            eps=config.rms_norm_eps,
            attention_scale=config.attention_scale,
            cos=self._keep(cos),
            sin=self._keep(sin),
            embedding=self._keep(weights.embedding),
            layers=cast(self._layers, POINTER(LayerStruct)),
            final_norm=self._keep(weights.final_norm),
            head=self._linear(weights.head),
        )
        self._scratch: dict[str, torch.Tensor] = {}

    def forward(self, batch: PagedBatch, num_threads: int) -> torch.Tensor:
        """See Decoder."""
        logits = torch.empty(len(batch.logit_rows), self._config.vocab_size)
        scratch = self._scratch_for(batch)
        scratch.logits = logits.data_ptr()
        if self.part_seconds is not None:
            scratch.seconds = cast(self.part_seconds.data_ptr(), POINTER(c_double))
        library.forward(self._model, batch, self.pool, scratch, num_threads=num_threads)
        return logits

    def time_parts(self) -> torch.Tensor:
        """From now on, add up where time goes: float64 [3] seconds in linear layers, attention and the rest."""
        self.part_seconds = torch.zeros(3, dtype=torch.float64)
        return self.part_seconds

    def _keep(self, tensor: torch.Tensor) -> int:
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearStruct:
        packed = pack_weight(weight)
        self._keep(packed)
        if bias is not None:
            self._keep(bias)
        return library.linear_struct(packed, weight.shape[0], weight.shape[1], bias)

    def _layer(self, layer: LayerWeights) -> LayerStruct:
        mlp = layer.mlp
        assert isinstance(mlp, MlpWeights)
        return LayerStruct(
            attention_norm=self._keep(layer.attention_norm),
            qkv=self._linear(layer.qkv, layer.qkv_bias),
            output=self._linear(layer.output, layer.output_bias),
            mlp_norm=self._keep(layer.mlp_norm),
            gate_up=self._linear(interleave_gate_up(mlp.gate, mlp.up)),
            down=self._linear(mlp.down),
        )

    def _scratch_for(self, batch: PagedBatch) -> ScratchStruct:
        config, dtype = self._config, self.pool.dtype
        tokens, query_size = batch.num_tokens, config.num_heads * config.head_dim
        qkv_size = query_size + 2 * config.num_kv_heads * config.head_dim
        return ScratchStruct(
            residual=self._grown("residual", tokens * config.hidden_size, torch.float32),
            normed=self._grown("normed", max(tokens, len(batch.logit_rows)) * config.hidden_size, dtype),
            qkv=self._grown("qkv", tokens * qkv_size, torch.float32),
            query=self._grown("query", tokens * query_size, dtype),
            activation=self._grown("activation", tokens * max(config.intermediate_size, query_size), dtype),
        )

    def _grown(self, name: str, size: int, dtype: torch.dtype) -> int:
        held = self._scratch.get(name)
        if held is None or held.numel() < size:
            held = self._scratch[name] = torch.empty(size, dtype=dtype)
        return held.data_ptr()
