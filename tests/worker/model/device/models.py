"""Small models with random weights, their reference decoder, and a TritonDecoder over a pool of its own."""

from __future__ import annotations

import copy
from pathlib import Path

import torch

from bench.family_models import make_model, save_model
from services.worker.model.config import ModelConfig
from services.worker.model.device.triton_decoder import TritonDecoder
from services.worker.model.kv_pool import TORCH_DTYPES, KvPool
from services.worker.model.layout import ComputeDtype, DeviceWeightDtype, KvDtype, KvLayout
from services.worker.model.model_files import open_model
from services.worker.model.torch_decoder import TorchDecoder
from services.worker.model.weights import ModelWeights, load_weights

CONTEXT = 128
NUM_BLOCKS = 24
CPU = torch.device("cpu")


def load(name: str, folder: Path, dtype: ComputeDtype) -> tuple[ModelConfig, ModelWeights]:
    """A family's model as a worker loads it."""
    files = open_model(save_model(make_model(name), folder))
    source, _ = files.read()
    return files.config, load_weights(source, files.config, TORCH_DTYPES[dtype])


def make_pool(config: ModelConfig, dtype: KvDtype, num_blocks: int = NUM_BLOCKS) -> KvPool:
    """An empty pool."""
    layout = KvLayout(config.num_kv_heads, config.num_layers, config.head_dim, dtype)
    return KvPool.on_device(CPU, layout, num_blocks)


def triton_decoder(
    config: ModelConfig,
    weights: ModelWeights,
    dtype: KvDtype,
    *,
    exact: bool = False,
    weight_dtype: DeviceWeightDtype = "dtype",
) -> TritonDecoder:
    """Over a pool of its own."""
    return TritonDecoder(config, weights, make_pool(config, dtype), CONTEXT, exact=exact, weight_dtype=weight_dtype)


def torch_decoder(config: ModelConfig, weights: ModelWeights, dtype: KvDtype) -> TorchDecoder:
    """The reference, over a pool of its own."""
    return TorchDecoder(config, copy.copy(weights), make_pool(config, dtype), CONTEXT)
