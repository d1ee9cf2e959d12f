"""The weights of a layer with an adapter in them: what an adapter's results are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from kernels.lora import LowRank
from services.worker.model.weights import LayerWeights, MlpWeights


def merged_layer(layer: LayerWeights, adapted: Mapping[str, LowRank]) -> LayerWeights:
    """The layer with scaling * up down of each adapted projection added to its weights; a dense MLP."""
    assert isinstance(layer.mlp, MlpWeights)
    keys = layer.output.shape[1]
    values = (len(layer.qkv) + keys) // 2
    parts = layer.qkv[:keys], layer.qkv[keys:values], layer.qkv[values:]
    return replace(
        layer,
        qkv=torch.cat([_merged(part, adapted.get(name)) for name, part in zip("qkv", parts, strict=True)]),
        output=_merged(layer.output, adapted.get("o")),
        mlp=MlpWeights(
            _merged(layer.mlp.gate, adapted.get("gate")),
            _merged(layer.mlp.up, adapted.get("up")),
            _merged(layer.mlp.down, adapted.get("down")),
        ),
    )


def _merged(matrix: torch.Tensor, adapted: LowRank | None) -> torch.Tensor:
    return matrix if adapted is None else matrix + adapted.scaling * (adapted.up @ adapted.down)
