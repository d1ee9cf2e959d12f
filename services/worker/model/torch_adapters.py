"""The adapters of the decoder in plain torch, and what they add to its linear layers: the specification at work."""

from __future__ import annotations

import torch

from kernels.lora import add_lora
from services.worker.model.adapter import AdapterWeights, PreparedAdapter


class TorchAdapters:
    """An AdapterTable."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._held: dict[int, AdapterWeights] = {}

    def prepare(self, weights: AdapterWeights) -> AdapterWeights:
        """See AdapterTable."""
        return weights

    def put(self, slot: int, prepared: PreparedAdapter | None) -> None:
        """See AdapterTable."""
        if prepared is None:
            self._held.pop(slot, None)
            return
        assert isinstance(prepared, AdapterWeights)
        self._held[slot] = prepared

    def add(self, out: torch.Tensor, x: torch.Tensor, layer: int, name: str, slots: torch.Tensor | None) -> None:
        """Add to out [T, n] what the tokens' adapters make of x [T, k] at a projection. slots: int32 [T] or None.

        Raises ValueError where a slot has no adapter.
        """
        for slot in [] if slots is None else sorted(set(slots.tolist()) - {-1}):
            if slot not in self._held:
                raise ValueError(f"malformed step: slot {slot} has no adapter")
            matrices = self._held[slot].layers[layer].get(name)
            if matrices is not None:
                add_lora(out, x, matrices.alone, torch.where(slots == slot, 0, -1))
