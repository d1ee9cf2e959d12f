"""Every field of every format of a wrong type, huge, negative, absent: a model that can be, or a line that refuses it.

Nothing else may be raised, and nothing may be built whose size such a field decides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import transformers

from bench.family_models import MODELS, SHAPE, quiet
from services.worker.model.config import ModelConfig
from services.worker.model.errors import InvalidWeights, UnsupportedModel
from services.worker.model.gguf_config import parse_gguf_config
from services.worker.model.gguf_file import GgufFile, GgufTensor
from services.worker.model.hf_config import parse_hf_config
from services.worker.model.model_files import open_model
from services.worker.model.rope import rotary_tables

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 10**9, 2**63, -(2**63), 10**400, 0.5, -0.5, 1e-300, 1e308, math.nan, math.inf),
    *("", "yes", "full_attention", "a\nb", "\ud800", [], [None], ["full_attention"], [10**9], [[]], {}, {"a": 1}),
)
ROPE_FIELDS = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate", "low_freq_factor"),
    *("high_freq_factor", "long_factor", "short_factor", "full_attention", "sliding_attention"),
)
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"rope_type": "longrope", "long_factor": [1.0] * 8, "short_factor": [1.0] * 8},
    {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
)


def parse_or_refuse(parse: Callable[[], ModelConfig]) -> ModelConfig | None:
    """The model, or None where it is refused in one line."""
    try:
        config = parse()
        for rope in (config.rope, config.rope_local):
            if rope is not None:
                assert all(table.isfinite().all() for table in rotary_tables(rope, min(64, config.max_positions)))
    except UnsupportedModel as error:
        text = str(error)
        assert text.isprintable(), ascii(text)
        assert len(text) < 600
        return None
    for name in ("rms_norm_eps", "attention_scale", "attention_softcap", "logit_softcap", "embedding_scale"):
        value = getattr(config, name)
        assert 0 <= value < math.inf, name
    return config


@pytest.mark.parametrize("name", MODELS)
def test_fields_of_config_json(name: str) -> None:
    prefix, fields = MODELS[name]
    with quiet():
        written = getattr(transformers, f"{prefix}Config")(**{**SHAPE, **fields}).to_dict()
    assert parse_or_refuse(partial(parse_hf_config, written)) is not None
    for field, value in itertools.product(sorted(written), ODD):
        parse_or_refuse(partial(parse_hf_config, {**written, field: value}))


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: str(rope["rope_type"]))
@pytest.mark.parametrize("model_type", ["llama", "phi3", "gemma3_text"])
def test_fields_of_rotary_embeddings(model_type: str, rope: dict[str, Any]) -> None:
    plain = {**SHAPE, "model_type": model_type, "head_dim": 16}
    for where in ("rope_parameters", "rope_scaling"):
        for field, value in itertools.product(ROPE_FIELDS, ODD):
            parse_or_refuse(partial(parse_hf_config, {**plain, where: {**rope, field: value}}))


def test_a_name_of_layers_where_a_list_is_needed() -> None:
    """It was read letter by letter, and every layer attended to everything."""
    with pytest.raises(UnsupportedModel, match="layer_types = 'sliding_attention': a list is needed"):
        parse_hf_config({**SHAPE, "model_type": "gemma2", "layer_types": "sliding_attention"})


def test_config_json_of_a_thousand_brackets(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(InvalidWeights, match=r"config\.json cannot be read"):
        open_model(tmp_path)


GGUF: dict[str, Any] = {
    "block_count": 3,
    "context_length": 256,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
    "rope.dimension_count": 16,
    "attention.key_length": 16,
}
GGUF_MORE: dict[str, dict[str, Any]] = {
    "llama": {"expert_count": 4, "expert_used_count": 2, "expert_weights_norm": True, "expert_gating_func": 1},
    "qwen2": {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
    },
    "qwen3": {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
    "qwen3moe": {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
    "phi3": {
        "rope.scaling.original_context_length": 64,
        "rope.scaling.attn_factor": 1.1,
        "attention.sliding_window": 40,
    },
    "gemma2": {
        "attention.sliding_window": 40,
        "attention.sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": {"attention.sliding_window": 40, "rope.freq_base_swa": 1e4, "attention.sliding_window_pattern": 6},
}


@pytest.mark.parametrize("architecture", GGUF_MORE)
def test_fields_of_gguf(architecture: str) -> None:
    fields = {f"{architecture}.{name}": value for name, value in {**GGUF, **GGUF_MORE[architecture]}.items()}
    metadata = {**fields, "general.architecture": architecture, "split.count": 1, f"{architecture}.vocab_size": 128}
    factors = np.ones(8, np.float32)
    tensors = {
        name: GgufTensor(name, (8,), gguf.GGMLQuantizationType.F32, factors.view(np.uint8).reshape(1, 32), 0)
        for name in ("rope_factors_long.weight", "rope_factors_short.weight")
        if architecture == "phi3"
    }
    whole = parse_or_refuse(partial(parse_gguf_config, GgufFile(metadata, tensors)))
    assert whole is not None
    for field, value in itertools.product(metadata, ODD):
        parse_or_refuse(partial(parse_gguf_config, GgufFile({**metadata, field: value}, tensors)))
