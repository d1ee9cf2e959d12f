"""The decoder of every model family on the compiled CPU kernels: packs the weights once, then one call a step.

Owns every tensor whose address the C structures hold. Scratch memory grows to the largest step seen and stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, c_double, cast

import torch

from kernels.batch import PagedBatch
from kernels.cpu import library
from kernels.cpu.huge_pages import HugePages
from kernels.cpu.packing import IntegerFormat, pack_linear
from kernels.cpu.structs import (
    ExpertsStruct,
    LayerStruct,
    LinearStruct,
    ModelStruct,
    RotaryStruct,
    ScratchStruct,
    linear_struct,
    rotary_struct,
)
from kernels.linear import interleave_gate_up
from services.worker.model.config import ModelConfig, RopeConfig
from services.worker.model.kv_pool import KvPool
from services.worker.model.native_adapters import NativeAdapters
from services.worker.model.rope import rotary_tables
from services.worker.model.seam import Seam
from services.worker.model.summing_call import SummingCall
from services.worker.model.weights import ExpertWeights, LayerWeights, MlpWeights, ModelWeights, embedding_scale


class NativeDecoder:
    """A Decoder on kernels/cpu. Raises BuildError or OSError where the library cannot be had.

    integers: the weights of all linear layers are rounded to it, the vocabulary head's too (to INT8 where the others
    are INT4); embeddings and routers stay in the compute dtype. Raises ValueError where a layer's shape has no such
    form. seam: of a rank of a group, whose part the other arguments are.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        pool: KvPool,
        num_positions: int,
        integers: IntegerFormat | None = None,
        adapter_slots: int = 0,
        seam: Seam | None = None,
    ) -> None:
        self.backend = f"native {library.instruction_set()}"
        self.part_seconds: torch.Tensor | None = None
        self._config = config
        self.adapters = NativeAdapters(config, adapter_slots)
        self._seam = seam
        self._summing = SummingCall(seam) if seam is not None and seam.sums else None
        self._headed = seam is None or seam.is_last
        self._integers: IntegerFormat | None = integers
        self.pool = pool.blocks
        self._kept: list[object] = []
        self._memory = HugePages()
        # What a decode step reads of the linear layers: their panels.
        self.linear_bytes = 0
        self._rotary = self._rotary_tables(num_positions)
        self._layers = (LayerStruct * config.num_layers)(*map(self._layer, range(config.num_layers), weights.layers))
        self._model = ModelStruct(
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate_size,
            activation=library.ACTIVATIONS[config.activation],
            eps=config.rms_norm_eps,
            attention_scale=config.attention_scale,
            attention_softcap=config.attention_softcap,
            logit_softcap=config.logit_softcap,
            embedding_scale=embedding_scale(config, self.pool.dtype),
            embedding=self._keep(weights.embedding) if len(weights.embedding) else None,
            first_token=0 if seam is None else seam.first_token,
            num_tokens=len(weights.embedding),
            layers=cast(self._layers, POINTER(LayerStruct)),
            final_norm=self._keep(weights.final_norm),
            adapters=self.adapters.address,
        )
        if self._headed:
            self._model.head = self._linear(weights.head, integers="int8" if integers == "int4" else integers)
        if self._summing is not None:
            self._model.sum_over_ranks = self._summing.function
        self._embedding_bytes = weights.embedding.numel() * weights.embedding.element_size()
        self._scratch: dict[str, torch.Tensor] = {}
        self._num_logits = 0

    def forward(self, batch: PagedBatch, num_threads: int) -> torch.Tensor:
        """See Decoder."""
        if batch.adapters is not None:
            self.adapters.check(batch.adapters.tolist())
        logits = torch.empty(len(batch.logit_rows), self._config.vocab_size if self._headed else 0)
        scratch = self._scratch_for(batch)
        scratch.logits = logits.data_ptr()
        if self.part_seconds is not None:
            scratch.seconds = cast(self.part_seconds.data_ptr(), POINTER(c_double))
        if self._seam is not None and not self._seam.is_first:
            self._seam.receive(self._residual(batch))
        if not library.forward(self._model, batch, self.pool, scratch, num_threads=num_threads):
            assert self._summing is not None
            raise self._summing.error()
        if self._seam is not None and not self._seam.is_last:
            self._seam.send(self._residual(batch))
        self._num_logits = len(logits)
        return logits

    def hidden(self) -> torch.Tensor:
        """See Decoder."""
        # The pass ends with the head's product, which has read them from there.
        size = self._config.hidden_size
        return self._scratch["normed"][: self._num_logits * size].view(self._num_logits, size).float()

    def _residual(self, batch: PagedBatch) -> torch.Tensor:
        hidden = self._config.hidden_size
        return self._scratch["residual"][: batch.num_tokens * hidden].view(-1, hidden)

    def time_parts(self) -> torch.Tensor:
        """From now on, add up where time goes: float64 [3] seconds in linear layers, attention and the rest."""
        self.part_seconds = torch.zeros(3, dtype=torch.float64)
        return self.part_seconds

    @property
    def weight_bytes(self) -> int:
        """Memory of panels and embedding; the rest is small."""
        return self.linear_bytes + self._embedding_bytes

    def _keep(self, tensor: torch.Tensor) -> int:
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _keep_optional(self, tensor: torch.Tensor | None) -> int | None:
        return None if tensor is None else self._keep(tensor)

    def _rotary_tables(self, num_positions: int) -> dict[RopeConfig, tuple[torch.Tensor, torch.Tensor]]:
        ropes = {self._config.layer_rope(index) for index in range(self._config.num_layers)}
        return {rope: rotary_tables(rope, num_positions) for rope in ropes}

    def _linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, integers: IntegerFormat | None
    ) -> LinearStruct:
        packed = pack_linear(weight, bias, integers).placed(self._memory.copy)
        self._kept.append(packed)
        self.linear_bytes += packed.weight.numel() * packed.weight.element_size()
        return linear_struct(packed)

    def _layer(self, index: int, layer: LayerWeights) -> LayerStruct:
        struct = LayerStruct(
            attention_norm=self._keep(layer.attention_norm),
            rotary=self._layer_rotary(index, layer),
            qkv=self._linear(layer.qkv, layer.qkv_bias, integers=self._integers),
            output=self._linear(layer.output, layer.output_bias, integers=self._integers),
            attention_post_norm=self._keep_optional(layer.attention_post_norm),
            mlp_norm=self._keep(layer.mlp_norm),
            mlp_post_norm=self._keep_optional(layer.mlp_post_norm),
            window=self._config.window(index),
        )
        if isinstance(layer.mlp, ExpertWeights):
            struct.experts = self._experts(layer.mlp)
        else:
            struct.gate_up = self._gate_up(layer.mlp)
            struct.down = self._linear(layer.mlp.down, integers=self._integers)
        return struct

    def _layer_rotary(self, index: int, layer: LayerWeights) -> RotaryStruct:
        tables = self._rotary[self._config.layer_rope(index)]
        self._kept += [layer.q_norm, layer.k_norm]
        return rotary_struct(*tables, layer.q_norm, layer.k_norm, self._config.rms_norm_eps)

    def _gate_up(self, mlp: MlpWeights) -> LinearStruct:
        return self._linear(interleave_gate_up(mlp.gate, mlp.up), integers=self._integers)

    def _experts(self, mlp: ExpertWeights) -> ExpertsStruct:
        moe = self._config.moe
        assert moe is not None
        size = moe.intermediate_size
        parts = zip(mlp.gate_up, mlp.down, strict=True)
        experts = [MlpWeights(gate_up[:size], gate_up[size:], down) for gate_up, down in parts]
        return ExpertsStruct(
            router=self._linear(mlp.router, integers=None),
            gate_up=self._array([self._gate_up(expert) for expert in experts]),
            down=self._array([self._linear(expert.down, integers=self._integers) for expert in experts]),
            count=moe.num_experts,
            first=moe.first_held,
            held=len(moe.held),
            per_token=moe.experts_per_token,
            intermediate=moe.intermediate_size,
            renormalise=moe.renormalise,
        )

    def _array(self, layers: Sequence[LinearStruct]) -> object:
        array = (LinearStruct * len(layers))(*layers)
        self._kept.append(array)
        return cast(array, POINTER(LinearStruct))

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
            projected=self._grown("projected", tokens * config.hidden_size, torch.float32)
            if config.post_norms or self._summing is not None
            else None,
            gains=None
            if batch.adapters is None
            else self._grown("gains", tokens * self.adapters.gain_width, torch.float32),
        )

    def _grown(self, name: str, size: int, dtype: torch.dtype) -> int:
        held = self._scratch.get(name)
        if held is None or held.numel() < size:
            held = self._scratch[name] = torch.empty(size, dtype=dtype)
        return held.data_ptr()
