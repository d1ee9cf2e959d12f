"""GGUF files: written by the gguf package, refused when they need more than is implemented."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from services.worker.model.errors import InvalidWeights, UnsupportedModel
from services.worker.model.gguf_config import parse_gguf_config
from services.worker.model.gguf_file import read_gguf
from services.worker.model.gguf_source import half_split_rows
from services.worker.model.model_files import open_model

FIELDS: dict[str, int | float] = {
    "block_count": 1,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}


def write(path: Path, tensors: dict[str, Any], arch: str = "llama", **changes: Any) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    for name, value in {**FIELDS, **changes}.items():
        if isinstance(value, str):
            writer.add_string(f"{arch}.{name}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{arch}.{name}", value)
        else:
            writer.add_float32(f"{arch}.{name}", value)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", ""])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


EMBEDDING = {"token_embd.weight": np.arange(320, dtype=np.float32).reshape(5, 64)}


def test_header_and_tensors(tmp_path: Path) -> None:
    freqs = {"rope_freqs.weight": np.full(8, 2.0, np.float32)}
    file = read_gguf(write(tmp_path / "m.gguf", {**EMBEDDING, **freqs}))
    config = parse_gguf_config(file)
    assert (config.vocab_size, config.head_dim, file.weight_format) == (5, 16, "gguf:F32")
    assert config.rms_norm_eps == 1e-5
    assert config.rope.scaling is not None
    assert config.rope.scaling.frequency_divisors == (2.0,) * 8
    assert np.array_equal(file.tensors["token_embd.weight"].dequantise(), EMBEDDING["token_embd.weight"])


@pytest.mark.parametrize(
    ("arch", "changes", "message"),
    [
        ("falcon", {}, "falcon"),
        ("llama", {"expert_count": 8, "expert_used_count": 2, "expert_gating_func": 2}, "expert_gating_func = 2"),
        ("llama", {"expert_count": 8}, "expert_used_count"),
        ("llama", {"expert_shared_count": 1}, "expert_shared_count"),
        ("llama", {"rope.scaling.type": "dynamic"}, "dynamic"),
        ("llama", {"rope.scaling.type": "longrope"}, "longrope"),
        ("llama", {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.attn_factor": 2.0}, "attn_f"),
        ("llama", {"rope.scaling.yarn_attn_factor": 0.5}, "yarn_attn_factor"),
        ("qwen3", {"rope.dimension_count": 8}, "rope.dimension_count"),
        ("qwen2", {"attention.sliding_window": 64}, "sliding_window"),
        ("gemma3", {"attention.sliding_window_pattern": 0}, "sliding_window_pattern"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("llama", {"attention.value_length": 32}, "value_length"),
        ("llama", {"rope.dimension_count": 8}, "rope.dimension_count"),
        ("llama", {"attention.sliding_window": 64}, "sliding_window"),
    ],
)
def test_unsupported(tmp_path: Path, arch: str, changes: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "m.gguf", EMBEDDING, arch, **changes)
    with pytest.raises(UnsupportedModel, match=message):
        open_model(path)


def test_one_part_of_several_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00002.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"split\.count = 2"):
        open_model(path)


def test_not_gguf_or_cut_short(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.gguf", EMBEDDING).read_bytes()
    for content in (b"", b"GGUF", b"nonsense" * 10, whole[:200], whole[:-700]):
        path = tmp_path / "broken.gguf"
        path.write_bytes(content)
        with pytest.raises(InvalidWeights, match=r"broken\.gguf is not a readable GGUF file"):
            open_model(path)


def test_half_split_rows() -> None:
    stored = torch.arange(16).view(16, 1)
    expected = [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
    assert half_split_rows(stored, 8)[:, 0].tolist() == expected


def test_the_default_model_opens_without_reading_weights(model_path: Path) -> None:
    model = open_model(model_path)
    config = model.config
    assert model.weight_format == "gguf:Q4_1,Q8_0"
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.rope.theta, config.vocab_size, config.tie_embeddings) == (100000.0, 49152, True)
