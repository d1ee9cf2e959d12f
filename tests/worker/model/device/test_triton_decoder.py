"""TritonDecoder in the interpreter against TorchDecoder: every family, chunked prefill, then decode beside another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.batch import PagedBatch
from services.worker.model.decoder import Decoder
from services.worker.model.layout import ComputeDtype, KvDtype
from services.worker.model.step_check import StepLimits, checked_batch
from tests.worker.model.steps import Chunk, make_step

from .models import CONTEXT, NUM_BLOCKS, load, torch_decoder, triton_decoder

# Windows, soft caps, post norms, normalised heads, partial rotation, a mixture, and none of them.
FAMILIES = ("gemma2", "gemma3", "phi3-longrope", "qwen3-moe", "qwen2")
TOKENS = np.random.default_rng(5).integers(3, 120, 60).tolist()
TABLE, OTHER = [7, 2, 9, 11], [3, 5]


def batch(*chunks: Chunk) -> PagedBatch:
    return checked_batch(make_step(chunks), StepLimits(128, NUM_BLOCKS, CONTEXT))


def life(decoder: Decoder, prompt: int = 20) -> torch.Tensor:
    """Logits of a chunk after a prompt's first tokens, beside another prompt, and of a decode step of both."""
    return torch.cat(
        [
            decoder.forward(batch(Chunk(TOKENS[prompt : prompt + 5], prompt, TABLE), Chunk(TOKENS[:7], 0, OTHER)), 1),
            decoder.forward(batch(Chunk(TOKENS[57:58], prompt + 5, TABLE), Chunk(TOKENS[7:8], 7, OTHER)), 1),
        ]
    )


def begin(decoder: Decoder, prompt: int = 20) -> None:
    """Compute the first tokens of the prompt."""
    decoder.forward(batch(Chunk(TOKENS[:prompt], 0, TABLE)), 1)


def errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (found - expected).norm(dim=-1) / expected.norm(dim=-1)


@pytest.mark.parametrize("name", FAMILIES)
def test_families_agree_in_float32(name: str, tmp_path: Path) -> None:
    """After more tokens than a window has; those are computed by the reference, as the interpreter is slow."""
    config, weights = load(name, tmp_path, "float32")
    reference, decoder = torch_decoder(config, weights, "float32"), triton_decoder(config, weights, "float32")
    begin(reference, 50)
    decoder.pool.copy_(reference.pool)
    assert errors(life(decoder, 50), life(reference, 50)).max() < 2e-5


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_a_quantised_pool_is_near(dtype: KvDtype, tmp_path: Path) -> None:
    config, weights = load("llama3", tmp_path, "float32")
    reference, decoder = torch_decoder(config, weights, "float32"), triton_decoder(config, weights, dtype)
    begin(reference)
    begin(decoder)
    expected, found = life(reference), life(decoder)
    assert 1e-4 < errors(found, expected).median() < (0.25 if dtype == "float8_e4m3fn" else 0.05)


@pytest.mark.parametrize("weight_dtype", ["dtype", "int8"])
def test_exact_mode_gives_a_row_the_same_bits_in_every_batch(weight_dtype: str, tmp_path: Path) -> None:
    config, weights = load("gemma2", tmp_path, "float32")
    decoder = triton_decoder(config, weights, "float32", exact=True, weight_dtype=weight_dtype)  # type: ignore[arg-type]
    whole = decoder.forward(batch(Chunk(TOKENS[:22], 0, TABLE)), 1)
    parts = [decoder.forward(batch(Chunk(TOKENS[:9], 0, OTHER)), 1)]
    beside = [Chunk(TOKENS[9:21], 9, OTHER), Chunk(TOKENS[:3], 0, [20])]
    parts += [decoder.forward(batch(*beside), 1)[:12]]
    parts += [decoder.forward(batch(Chunk(TOKENS[21:22], 21, OTHER)), 1)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(("weight_dtype", "limit"), [("int8", 0.1), ("int4", 0.6), ("float8", 0.3)])
def test_rounded_weights_are_near(weight_dtype: str, limit: float, tmp_path: Path) -> None:
    dtype: ComputeDtype = "bfloat16"
    config, weights = load("llama3", tmp_path, dtype)
    reference = torch_decoder(config, weights, dtype)
    decoder = triton_decoder(config, weights, dtype, weight_dtype=weight_dtype)  # type: ignore[arg-type]
    begin(reference)
    decoder.pool.copy_(reference.pool)
    expected, found = life(reference), life(decoder)
    assert 0 < errors(found, expected).median() < limit


def test_float8_products_are_not_exact(tmp_path: Path) -> None:
    config, weights = load("llama3", tmp_path, "bfloat16")
    with pytest.raises(ValueError, match="not exact"):
        triton_decoder(config, weights, "bfloat16", exact=True, weight_dtype="float8")
