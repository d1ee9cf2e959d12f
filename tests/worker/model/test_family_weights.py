"""Tensors as families store them: joined, stacked, beside a model of images; none missing, none over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bench.family_models import GEMMA3_ROPE, SHAPE, VOCAB_SIZE, make_model, quiet, save_model
from services.worker.model.errors import InvalidWeights, UnsupportedModel
from services.worker.model.model_files import open_model
from services.worker.model.weights import ExpertWeights, load_weights

from .conftest import loaded
from .steps import Chunk, run

TOKENS = torch.randint(3, VOCAB_SIZE, (70,), generator=torch.Generator().manual_seed(2)).tolist()
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def logits_of(folder: Path) -> torch.Tensor:
    with loaded(folder, "float32", num_blocks=5, context=128, compiled=False) as runner:
        return run(runner, Chunk(TOKENS, 0, list(range(5))))


def expected_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    return logits


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_stacked_experts(tmp_path: Path, name: str) -> None:
    """As transformers 5 has them in memory: gate and up joined, all experts of a layer in one tensor."""
    model = make_model(name)
    save_model(model, tmp_path)
    tensors = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    assert any(key.endswith("experts.gate_up_proj") for key in tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    torch.testing.assert_close(logits_of(tmp_path), expected_of(model), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("prefixes", ["of the hub", "in memory"])
def test_text_part_of_a_model_that_reads_images(tmp_path: Path, prefixes: str) -> None:
    text = {**SHAPE, "head_dim": 32, "sliding_window": 40, "rope_parameters": GEMMA3_ROPE}
    text["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    with quiet():
        config = transformers.Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
        config._attn_implementation = "eager"
        torch.manual_seed(0)
        model: Any = transformers.Gemma3ForConditionalGeneration(config).eval()
    save_model(model, tmp_path)
    if prefixes == "in memory":
        stored = {key: value for key, value in model.state_dict().items() if key != "lm_head.weight"}
        save_file({key: value.contiguous() for key, value in stored.items()}, tmp_path / "model.safetensors")
    assert any("vision_tower" in key for key in load_file(tmp_path / "model.safetensors"))
    torch.testing.assert_close(logits_of(tmp_path), expected_of(model), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("phi3", "model.layers.1.self_attn.qkv_proj.weight"),
        ("phi3", "model.layers.2.mlp.gate_up_proj.weight"),
        ("qwen2", "model.layers.0.self_attn.k_proj.bias"),
        ("qwen3", "model.layers.0.self_attn.q_norm.weight"),
        ("gemma2", "model.layers.2.pre_feedforward_layernorm.weight"),
        ("gemma3", "model.layers.1.post_feedforward_layernorm.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.gate.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w2.weight"),
        ("qwen3-moe", "model.layers.2.mlp.experts.5.up_proj.weight"),
        ("qwen3-moe", "model.layers.1.mlp.gate_proj.weight"),
    ],
)
def test_nothing_may_be_missing_or_left_over(tmp_path: Path, name: str, tensor: str) -> None:
    save_model(make_model(name), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    removed = tensors.pop(tensor)
    save_file(tensors, path)
    with pytest.raises(InvalidWeights, match="is missing"):
        logits_of(tmp_path)
    for extra in (f"{tensor}_scale", "vision_tower.patch.weight"):
        save_file({**tensors, tensor: removed, extra: torch.ones(1)}, path)
        with pytest.raises(InvalidWeights, match=f"{extra} has no place"):
            logits_of(tmp_path)


def test_gemma_adds_one_to_its_norms_and_others_do_not(tmp_path: Path) -> None:
    for name, offset in (("gemma3", 1.0), ("qwen3", 0.0)):
        model: Any = make_model(name)
        opened = open_model(save_model(model, tmp_path / name))
        source, _ = opened.read()
        weights = load_weights(source, opened.config, torch.bfloat16)
        stored = model.model.layers[1].self_attn.q_norm.weight
        assert weights.layers[1].q_norm is not None
        torch.testing.assert_close(weights.layers[1].q_norm, stored + offset)
        assert weights.final_norm.dtype == torch.float32


def test_experts_keep_their_order(tmp_path: Path) -> None:
    model: Any = make_model("qwen3-moe")
    opened = open_model(save_model(model, tmp_path))
    source, _ = opened.read()
    layers = load_weights(source, opened.config, torch.float32).layers
    assert [isinstance(layer.mlp, ExpertWeights) for layer in layers] == [True, False, True]
    mlp = layers[2].mlp
    assert isinstance(mlp, ExpertWeights)
    assert torch.equal(mlp.gate_up, model.model.layers[2].mlp.experts.gate_up_proj)
    assert torch.equal(mlp.down, model.model.layers[2].mlp.experts.down_proj)


def test_a_wrapper_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    save_model(make_model("gemma3"), tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({"model_type": "gemma3", "architectures": ["Gemma3Model"], "text_config": fields}))
    with pytest.raises(UnsupportedModel, match="Gemma3Model"):
        open_model(tmp_path)
