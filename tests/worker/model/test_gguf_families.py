"""GGUF files of every family, written by the converter's conventions, compute what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from bench.family_gguf import ARCHITECTURES, write_gguf
from bench.family_models import MODELS, VOCAB_SIZE, make_model, quiet
from services.worker.model.gguf_config import parse_gguf_config
from services.worker.model.gguf_file import read_gguf

from .conftest import loaded
from .steps import Chunk, run
from .test_gguf import EMBEDDING, write

MAX_ERROR = 1e-4
NUM_TOKENS = 150
# What GGUF has no word for: the window of Mistral and Qwen 2, Gemma's scale apart from head_dim, its pattern.
CHANGES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32, "num_hidden_layers": 7, "layer_types": None},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}


def check(model: torch.nn.Module, path: Path) -> None:
    """path: the model's GGUF file."""
    tokens = torch.randint(3, VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    with loaded(path, "float32", num_blocks=10, context=256, compiled=False) as runner:
        logits = run(runner, Chunk(tokens, 0, list(range(10))))
    errors = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.max().item() < MAX_ERROR


@pytest.mark.parametrize("name", MODELS)
def test_family(tmp_path: Path, name: str) -> None:
    model = make_model(name, **CHANGES.get(name, {}))
    check(model, write_gguf(model, tmp_path / "model.gguf"))


def test_yarn(tmp_path: Path) -> None:
    model = make_model("qwen3", rope_parameters=YARN)
    check(model, write_gguf(model, tmp_path / "model.gguf"))


@pytest.mark.parametrize("name", ["llama2", "mixtral", "phi3"])
def test_quantised(tmp_path: Path, name: str) -> None:
    """Rows of stacked experts and of joined projections too."""
    kind = gguf.GGMLQuantizationType.Q8_0
    model: Any = make_model(name, **CHANGES.get(name, {}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                rounded = gguf.quants.dequantize(gguf.quants.quantize(parameter.numpy(), kind), kind)
                parameter.copy_(torch.from_numpy(rounded).view_as(parameter))
    path = write_gguf(model, tmp_path / "model.gguf", quantisation=kind)
    assert read_gguf(path).weight_format == "gguf:Q8_0"
    check(model, path)


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3", "phi3", "gemma2", "gemma3"])
def test_transformers_reads_the_same_tensors(tmp_path: Path, name: str) -> None:
    """A second opinion on the files that these tests write."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model: Any = make_model(name, **CHANGES.get(name, {}))
    path = write_gguf(model, tmp_path / "model.gguf")
    with quiet():
        tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    stored = model.state_dict()
    assert stored.keys() - tensors.keys() <= {"lm_head.weight"}
    for key, tensor in tensors.items():
        torch.testing.assert_close(tensor, stored[key], atol=1e-6, rtol=1e-6)


def test_every_architecture_is_tried() -> None:
    assert {ARCHITECTURES[make_model(name).config.model_type] for name in MODELS} == set(ARCHITECTURES.values())


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_largest_gemma_scales_by_its_hidden_size(tmp_path: Path, architecture: str, layers: int) -> None:
    """As its authors set query_pre_attn_scalar, which GGUF leaves out."""
    shape = {"attention.key_length": 32, "attention.value_length": 32, "attention.sliding_window": 16}
    scales = []
    for count in (layers, layers - 1):
        path = write(tmp_path / f"{count}.gguf", EMBEDDING, architecture, block_count=count, **shape)
        scales.append(parse_gguf_config(read_gguf(path)).attention_scale)
    assert scales == [16**-0.5, 32**-0.5]


def test_silent_gemma2_has_its_authors_defaults(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", EMBEDDING, "gemma2", block_count=3)
    config = parse_gguf_config(read_gguf(path))
    assert (config.attention_softcap, config.logit_softcap, config.windows) == (50.0, 30.0, (4096, 0, 4096))
