"""Folders of random low-rank adapters, as PEFT saves them, for tests and benches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from services.common.adapter_files import CONFIG_FILE, PROJECTIONS, WEIGHTS_FILE
from services.worker.model.adapter import projection_shape
from services.worker.model.config import ModelConfig


def write_random_adapter(
    folder: Path,
    config: ModelConfig,
    *,
    seed: int,
    rank: int = 8,
    projections: Sequence[str] = PROJECTIONS,
    layers: Sequence[int] | None = None,
    strength: float = 0.3,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """An adapter whose products are about `strength` times what weights of usual size make of the same input.

    layers: None for all. Returns the folder.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(config.num_layers) if layers is None else layers:
        for name in projections:
            part = "self_attn" if name in "qkvo" else "mlp"
            prefix = f"base_model.model.model.layers.{layer}.{part}.{name}_proj.lora_"
            rows, columns = projection_shape(name, config)
            down = torch.randn(rank, columns, generator=generator) / columns**0.5
            up = torch.randn(rows, rank, generator=generator) * (strength / rank**0.5)
            tensors[f"{prefix}A.weight"], tensors[f"{prefix}B.weight"] = down.to(dtype), up.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS_FILE)
    peft = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [f"{name}_proj" for name in projections],
        "bias": "none",
    }
    (folder / CONFIG_FILE).write_text(json.dumps(peft))
    return folder
