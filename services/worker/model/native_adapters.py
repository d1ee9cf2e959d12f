"""The adapters of the compiled decoder: packed once when they are loaded, found by address from their slots."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import addressof, c_void_p
from dataclasses import dataclass

import torch

from kernels.cpu.adapters import SIXTEEN, Place, pack_input
from kernels.cpu.huge_pages import HUGE_PAGE_BYTES, HugePages
from kernels.cpu.structs import AdapterInputStruct, AdapterLayerStruct
from kernels.lora import LowRank
from services.worker.model.adapter import AdapterWeights, PreparedAdapter
from services.worker.model.config import ModelConfig

# Gate and up alternate by sixteen columns (kernels/linear.py).
_ALTERNATING = 2 * SIXTEEN


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """layers: a C array of AdapterLayerStruct. tensors: what it refers to."""

    layers: object
    tensors: tuple[torch.Tensor, ...]

    @property
    def num_bytes(self) -> int:
        """Memory of the tensors, which lie in pages of their own."""
        return -(-sum(tensor.nbytes for tensor in self.tensors) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


class NativeAdapters:
    """An AdapterTable."""

    def __init__(self, config: ModelConfig, num_slots: int) -> None:
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.num_slots = num_slots
        self._places: dict[str, dict[str, Place]] = {
            "qkv": {"q": Place(0), "k": Place(query), "v": Place(query + kv)},
            "output": {"o": Place(0)},
            "gate_up": {"gate": Place(0, _ALTERNATING), "up": Place(SIXTEEN, _ALTERNATING)},
            "down": {"down": Place(0)},
        }
        self._held: dict[int, PackedAdapter] = {}
        self._addresses = (c_void_p * max(1, num_slots))()
        # Most outputs of an adapted linear layer, in whole panels.
        panel = 2 * SIXTEEN
        widest = max(query + 2 * kv, 2 * config.intermediate_size, config.hidden_size)
        self.gain_width = -(-widest // panel) * panel

    @property
    def address(self) -> int:
        """Of the table by slot; it stays."""
        return addressof(self._addresses)

    def prepare(self, weights: AdapterWeights) -> PackedAdapter:
        """See AdapterTable."""
        tensors: list[torch.Tensor] = []
        # In the order in which a step reads them; it goes with the adapter.
        memory = HugePages()
        layers = (AdapterLayerStruct * len(weights.layers))()
        for struct, matrices in zip(layers, weights.layers, strict=True):
            for name, places in self._places.items():
                setattr(struct, name, _input(matrices, places, memory, tensors))
        return PackedAdapter(layers, tuple(tensors))

    def put(self, slot: int, prepared: PreparedAdapter | None) -> None:
        """See AdapterTable."""
        if prepared is None:
            self._addresses[slot] = None
            self._held.pop(slot, None)
            return
        assert isinstance(prepared, PackedAdapter)
        self._held[slot] = prepared
        self._addresses[slot] = addressof(prepared.layers)  # type: ignore[arg-type]

    def check(self, slots: list[int]) -> None:
        """Raise ValueError where a slot has no adapter."""
        empty = [slot for slot in slots if slot >= 0 and slot not in self._held]
        if empty:
            raise ValueError(f"malformed step: slot {empty[0]} has no adapter")


def _input(
    matrices: Mapping[str, LowRank], places: Mapping[str, Place], memory: HugePages, tensors: list[torch.Tensor]
) -> AdapterInputStruct:
    struct, kept = pack_input([(matrices[name], place) for name, place in places.items() if name in matrices], memory)
    tensors += kept
    return struct
