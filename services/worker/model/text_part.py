"""The language model inside a checkpoint that reads images too, under the names of a checkpoint of its own."""

from __future__ import annotations

import torch

from services.worker.model.weights import TensorSource

# What stands before the names of the language model, as on the hub and as transformers 5 has it in memory.
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


class TextPart:
    """A TensorSource that shows what another holds of the language model; of a text-only checkpoint, everything."""

    centred_norms = True

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        names = source.names()
        others = _OTHER_PARTS if any(name.startswith(tuple(_PREFIXES)) for name in names) else ()
        self._stored = {text_name(name): name for name in names if not name.startswith(others)}

    def names(self) -> set[str]:
        return set(self._stored)

    def read(self, name: str) -> torch.Tensor:
        return self._source.read(self._stored[name])


def text_name(name: str) -> str:
    """The name that a tensor of the language model has in a checkpoint of its own; others keep theirs."""
    for prefix, plain in _PREFIXES.items():
        if name.startswith(prefix):
            return plain + name[len(prefix) :]
    return name
