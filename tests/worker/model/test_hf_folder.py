"""Hugging Face folders: small random models saved by transformers give transformers' logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from services.worker.model.errors import InvalidWeights, UnsupportedModel
from services.worker.model.hf_config import parse_hf_config, read_hf_config
from services.worker.model.model_files import open_model

from .conftest import loaded
from .steps import Chunk, run

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 144,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True},
    "llama3": {"rope_parameters": LLAMA3, "tie_word_embeddings": False},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "bias": {"attention_bias": True},
    "one kv head": {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 301},
}


def save(folder: Path, *, shard_size: str = "5GB", **changes: Any) -> torch.nn.Module:
    torch.manual_seed(4)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, **changes}))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model.eval()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_round_trip(tmp_path: Path, changes: dict[str, Any], compiled: bool) -> None:
    model = save(tmp_path, shard_size="60KB", **changes)
    assert (tmp_path / "model.safetensors.index.json").exists()
    tokens = torch.randint(0, 300, (1, 200))
    with torch.inference_mode():
        expected = model(tokens).logits[0]
    with loaded(tmp_path, "float32", num_blocks=16, context=256, compiled=compiled) as runner:
        logits = run(runner, Chunk(tokens[0].tolist(), 0, list(range(15, 1, -1))))
        assert runner.spec.weight_format == "safetensors"
    error = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max().item() < 1e-3


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, "mixtral"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "proportional", "factor": 2.0}}, "proportional"),
        ({"rope_parameters": {**LLAMA3, "attention_factor": 2.0}}, "attention_factor"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"hidden_size": 60}, "hidden_size = 60"),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"head_dim": 512}, "head_dim = 512"),
        ({"vocab_size": 0}, "vocab_size = 0"),
        ({"rms_norm_eps": None}, "rms_norm_eps = None"),
    ],
)
def test_unsupported_config(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(UnsupportedModel, match=message) as refused:
        read_hf_config(tmp_path)
    assert "\n" not in str(refused.value)


def test_older_rope_fields() -> None:
    older = {**SMALL, "model_type": "llama", "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    config = parse_hf_config(older)
    assert config.rope.theta == 5e5
    assert config.rope.scaling is not None
    assert config.rope.scaling.factor == 2.0


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    save(tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    name = "model.layers.1.mlp.up_proj.weight"
    for broken, message in (
        ({key: value for key, value in tensors.items() if key != name}, f"{name} is missing"),
        ({**tensors, name: tensors[name][:8].clone()}, f"{name} has shape \\[8, 64\\]"),
        ({**tensors, name: tensors[name].to(torch.int8)}, f"{name} has dtype"),
        ({**tensors, "model.layers.2.mlp.up_proj.weight": tensors[name].clone()}, "layers.2.mlp.up_proj.*no place"),
    ):
        save_file(broken, weights)
        with pytest.raises(InvalidWeights, match=message):
            loaded(tmp_path, "float32", num_blocks=2, context=32, compiled=True)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidWeights, match="no such model"):
        open_model(tmp_path / "nothing")
    with pytest.raises(InvalidWeights, match=r"config\.json"):
        open_model(tmp_path)
    save(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(InvalidWeights, match="not a readable safetensors"):
        open_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InvalidWeights, match="holds neither"):
        open_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}')
    with pytest.raises(InvalidWeights, match=r"\.\./b"):
        open_model(tmp_path)
