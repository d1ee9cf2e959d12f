"""Weights rounded to whole numbers: close, exact in every cut, told apart by digest and format, refused where unfit."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from bench.family_models import MODELS, VOCAB_SIZE, make_model, save_model
from services.common.settings import ConfigurationError
from services.worker.config import WorkerSettings, check_settings
from services.worker.model.errors import UnsupportedModel
from services.worker.model.layout import ComputeDtype, CpuWeightDtype
from services.worker.model.load import kv_layout, load_runner
from services.worker.model.model_files import open_model
from services.worker.model.runner import CpuRunner

from .steps import Chunk, run, run_in_chunks

TABLE = list(range(5))
# Mean relative error of the logits against bfloat16 weights; random weights are harder to round than trained ones.
ERRORS: dict[CpuWeightDtype, float] = {"int8": 0.05, "int8-dynamic": 0.15, "int4": 0.6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model(next(iter(MODELS))), tmp_path_factory.mktemp("model"))


def loaded(folder: Path, weight_dtype: CpuWeightDtype, dtype: ComputeDtype = "bfloat16") -> CpuRunner:
    layout = kv_layout(open_model(folder).config, dtype)
    pool = mmap.mmap(-1, layout.pool_bytes(16))
    return load_runner(folder, dtype=dtype, weight_dtype=weight_dtype, pool_buffer=pool, served_context=128)


@pytest.mark.parametrize("weight_dtype", ERRORS)
def test_close_and_exact(folder: Path, weight_dtype: CpuWeightDtype) -> None:
    tokens = torch.randint(3, VOCAB_SIZE, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    with loaded(folder, "dtype") as plain, loaded(folder, weight_dtype) as rounded:
        expected, found = run(plain, Chunk(tokens, 0, TABLE)), run(rounded, Chunk(tokens, 0, TABLE))
        error = (found - expected).norm(dim=1) / expected.norm(dim=1)
        assert 0 < error.mean().item() < ERRORS[weight_dtype]
        assert torch.equal(run_in_chunks(rounded, tokens, (1, 17, 7, 30), [9, 8, 7, 6, 5]), found)
        assert rounded.spec.weight_format == f"{plain.spec.weight_format} as {weight_dtype}"
        assert rounded.spec.digest != plain.spec.digest
        assert rounded.spec.memory.weight_bytes < plain.spec.memory.weight_bytes


def test_float32_activations_are_refused(folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match="weight_dtype = int8: needs dtype bfloat16"):
        loaded(folder, "int8", "float32")


def test_settings_refuse_what_cannot_be_executed() -> None:
    check_settings(WorkerSettings.model_validate({"weight_dtype": "int8"}))
    with pytest.raises(ConfigurationError, match="weight_dtype='int8'"):
        check_settings(WorkerSettings.model_validate({"weight_dtype": "int8", "dtype": "float32"}))
