"""Every rope scaling against transformers' own: the frequencies and what multiplies cosine and sine."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bench.family_models import GEMMA3_ROPE, LLAMA3, LONGROPE, SHAPE, make_model, quiet
from services.worker.model.config import ModelConfig
from services.worker.model.hf_config import parse_hf_config
from services.worker.model.rope import inverse_frequencies, rotary_tables

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e6}
LONG_16 = {**LONGROPE, "short_factor": [1.1] * 8, "long_factor": [2.0 + pair for pair in range(8)]}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "linear": ({"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}, 256),
    "dynamic within its length": ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, 200),
    "dynamic beyond it": ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, 500),
    "llama3": (LLAMA3, 256),
    "yarn": (YARN, 256),
    "yarn with its betas": ({**YARN, "beta_fast": 16.0, "beta_slow": 2.0}, 256),
    "yarn untruncated": ({**YARN, "truncate": False}, 256),
    "yarn, one mscale": ({**YARN, "mscale": 0.7}, 256),
    "yarn, both mscales": ({**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}, 256),
    "yarn, attention factor": ({**YARN, "attention_factor": 0.8, "mscale": 1.0, "mscale_all_dim": 0.5}, 256),
    "longrope short": (LONG_16, 64),
    "longrope long": (LONG_16, 65),
    "longrope with factor": ({**LONG_16, "factor": 32.0}, 256),
}


def parsed(model_type: str, **fields: Any) -> ModelConfig:
    return parse_hf_config({**SHAPE, "model_type": model_type, **fields})


@pytest.mark.parametrize(("parameters", "context"), CASES.values(), ids=CASES.keys())
def test_scalings(parameters: dict[str, Any], context: int) -> None:
    with quiet():
        config = transformers.LlamaConfig(**SHAPE, rope_parameters=dict(parameters))
        expected, attention = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=context)
    rope = parsed("llama", rope_parameters=parameters).rope
    torch.testing.assert_close(inverse_frequencies(rope, context), expected, atol=0, rtol=2e-6)
    cos, _ = rotary_tables(rope, context)
    assert cos.shape == (context, 8)
    assert cos[0].tolist() == pytest.approx([attention] * 8)


@pytest.mark.parametrize("parameters", [YARN, {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}])
def test_stretched_models_reach_beyond_what_they_state(parameters: dict[str, Any]) -> None:
    config = parsed("llama", rope_parameters=parameters, max_position_embeddings=64)
    assert config.max_positions == 256


def test_dynamic_is_fixed_by_the_served_context() -> None:
    rope = parsed("llama", rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}).rope
    assert torch.equal(inverse_frequencies(rope, 10), inverse_frequencies(rope, 256))
    assert not torch.equal(inverse_frequencies(rope, 257), inverse_frequencies(rope, 256))


def test_older_fields_of_phi3() -> None:
    """`su` was its name; the original length stands outside, and is what counts."""
    old = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "original_max_position_embeddings": 99}
    config = parsed("phi3", rope_scaling=old, rope_theta=5e4, original_max_position_embeddings=64)
    assert config.rope.theta == 5e4
    assert config.rope.scaling is not None
    assert (config.rope.scaling.kind, config.rope.scaling.original_max_positions) == ("longrope", 64)
    assert config.rope.scaling.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))


def test_gemma3_in_old_and_new_fields() -> None:
    shape = {"head_dim": 16, "num_hidden_layers": 6, "sliding_window": 32}
    old = parsed(
        "gemma3_text",
        **shape,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"factor": 4.0, "rope_type": "linear"},
        sliding_window_pattern=6,
    )
    types = ["sliding_attention"] * 5 + ["full_attention"]
    new = parsed("gemma3_text", **shape, rope_parameters=GEMMA3_ROPE, layer_types=types)
    assert old == new
    assert (new.layer_rope(0).theta, new.layer_rope(5).theta) == (1e4, 1e6)
    assert new.layer_rope(5).scaling is not None


def test_two_contexts_are_two_models() -> None:
    """A longrope model keeps its short divisors while it serves short contexts, and equals transformers there."""
    model: Any = make_model("phi3-longrope")
    with torch.inference_mode():
        rotary = model.model.rotary_emb
        short = rotary(torch.zeros(1), torch.arange(64)[None])[0][0, :, :6]
        long = rotary(torch.zeros(1), torch.arange(65)[None])[0][0, :, :6]
    rope = parse_hf_config(model.config.to_dict()).rope
    torch.testing.assert_close(rotary_tables(rope, 64)[0], short, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rotary_tables(rope, 65)[0], long, atol=1e-5, rtol=1e-5)
