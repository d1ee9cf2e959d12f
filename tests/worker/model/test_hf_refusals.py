"""What a config.json may not ask for: the field and its value are named. And what it may leave out."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from bench.family_models import MODELS, SHAPE, quiet
from services.worker.model.config import ModelConfig
from services.worker.model.errors import UnsupportedModel
from services.worker.model.hf_config import parse_hf_config
from services.worker.model.hf_families import FAMILIES

LONG = {"rope_type": "longrope", "long_factor": [1.0] * 8}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("deepseek_v3", {}, "architecture 'deepseek_v3'"),
    ("phimoe", {}, "architecture 'phimoe'"),
    ("gemma3n_text", {}, "architecture 'gemma3n_text'"),
    ("mistral3", {"text_config": {}}, "architecture 'mistral3'"),
    ("qwen2", {"architectures": ["Qwen2ForSequenceClassification"]}, "Qwen2ForSequenceClassification"),
    ("gemma3", {"architectures": ["Gemma3ForConditionalGeneration"]}, "text_config = None"),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config: 'fp8'"),
    ("qwen3", {"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantization_config: 'awq'"),
    ("llama", {"compression_config": {"quant_method": "compressed-tensors"}}, "'compressed-tensors'"),
    ("mistral", {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
    ("mistral", {"attention_bias": True}, "attention_bias = True"),
    (
        "qwen2",
        {"layer_types": ["full_attention", "linear_attention", "full_attention"], "use_sliding_window": True},
        "lin",
    ),
    ("qwen2", {"use_sliding_window": "yes"}, "use_sliding_window = 'yes'"),
    ("qwen3_moe", {"use_sliding_window": True, "num_experts": 4}, "use_sliding_window = True"),
    ("qwen3_moe", {}, "num_local_experts = None"),
    ("qwen3_moe", {"num_experts": 4, "shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size = 64"),
    ("mixtral", {"num_local_experts": "4"}, "num_local_experts = '4'"),
    ("phi3", {"attention_bias": True}, "attention_bias = True"),
    ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling 'linear'"),
    ("phi3", {"rope_scaling": {**LONG, "short_factor": [1.0] * 3}}, "factors: 3 instead of 8"),
    ("phi3", {"rope_scaling": LONG}, "short_factor = None"),
    ("phi3", {"rope_scaling": {**LONG, "short_factor": [1.0] * 8, "short_mscale": 1.1}}, "short_mscale = 1.1"),
    ("phi3", {"full_attn_mod": 2}, "full_attn_mod = 2"),
    ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    ("gemma3_text", {"rope_parameters": {"full_attention": {}, "chunked_attention": {}}}, "chunked_attention"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ("llama", {"rope_parameters": {"rope_type": "axial"}}, "rope scaling 'axial'"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "extrapolation_factor": 1.0}},
        "extrapolation_f",
    ),
    ("llama", {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "factor = None"),
    (
        "llama",
        {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"type": "linear", "factor": 2}},
        "rope_scaling =",
    ),
    ("llama", {"rope_scaling": "linear"}, "rope parameters 'linear'"),
    ("llama", {"attn_temperature_tuning": True}, "attn_temperature_tuning = True"),
    ("llama", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers"),
    ("llama", {"num_attention_heads": 0}, "num_attention_heads = 0"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 0.0}}, "factor = 0.0"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 0}}, "embeddings = 0"),
    ("llama", {"rope_theta": -1.0}, "rope_theta = -1.0"),
    ("phi3", {"rope_scaling": {**LONG, "short_factor": [0.0] * 8}}, "0.0 is not positive"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0"),
    ("gemma2", {"sliding_window": -5}, "sliding_window = -5"),
    ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
    ("mistral", {"sliding_window": -5}, "windows: -5"),
    ("qwen3_moe", {"num_experts": 4, "decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 5}, "experts_per_token = 5"),
    ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}, "intermediate_size = 20"),
    ("llama", {"num_key_value_heads": True}, "num_key_value_heads = True"),
]


def parsed(model_type: str, **fields: Any) -> ModelConfig:
    return parse_hf_config({**SHAPE, "model_type": model_type, **fields})


@pytest.mark.parametrize(("model_type", "fields", "message"), REFUSED)
def test_refused(model_type: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        parsed(model_type, **fields)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", MODELS)
def test_an_unknown_field_of_any_family(name: str) -> None:
    prefix, fields = MODELS[name]
    with quiet():
        written = getattr(transformers, f"{prefix}Config")(**{**SHAPE, **fields}).to_dict()
    assert parse_hf_config(written).num_layers == 3
    with pytest.raises(UnsupportedModel, match="residual_multiplier"):
        parse_hf_config({**written, "residual_multiplier": 0.2})


SILENT = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_is_left_out_means_what_transformers_takes(model_type: str) -> None:
    """A config.json that states sizes only, against transformers' defaults spelled out."""
    sizes = {**SILENT, "num_attention_heads": 4}
    if model_type == "qwen3_moe":
        sizes.update(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=False)
    if model_type in ("qwen2", "llama", "phi3", "qwen3"):
        sizes["num_key_value_heads"] = 4
    else:
        sizes["num_attention_heads"] = 8
        sizes["hidden_size"] = 128
    with quiet():
        spelled = transformers.AutoConfig.for_model(model_type, **sizes).to_dict()
    assert parse_hf_config({**sizes, "model_type": model_type}) == parse_hf_config(spelled)


def test_windows() -> None:
    assert parsed("mistral", sliding_window=None).windows == ()
    assert parsed("mistral", sliding_window=8).windows == (8, 8, 8)
    assert parsed("qwen2", use_sliding_window=False, sliding_window=8, max_window_layers=1).windows == ()
    assert parsed("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1).windows == (0, 8, 8)
    assert parsed("gemma2", sliding_window=8, head_dim=16).windows == (8, 0, 8)
    types = ["full_attention", "sliding_attention", "full_attention"]
    assert parsed("gemma2", sliding_window=8, head_dim=16, layer_types=types).windows == (0, 8, 0)


def test_sparse_layers() -> None:
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    every_second = parsed("qwen3_moe", **moe, decoder_sparse_step=2).moe
    assert every_second is not None
    assert every_second.sparse == (False, True, False)
    without_first = parsed("qwen3_moe", **moe, mlp_only_layers=[0]).moe
    assert without_first is not None
    assert without_first.sparse == (False, True, True)
