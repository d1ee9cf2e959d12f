"""ModelConfig from a Hugging Face config.json.

Fields are known to matter, known not to, or unknown. An unknown field that is set to something refuses the model: it
may change what the model computes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.worker.model.config import ModelConfig, RopeConfig, RopeScaling
from services.worker.model.errors import InvalidWeights, UnsupportedModel

Fields = Mapping[str, Any]

_READ = frozenset(
    (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "max_position_embeddings",
        "tie_word_embeddings",
        "attention_bias",
        "model_type",
        "architectures",
    )
)
# Only this value is implemented; an absent field means the same.
_REQUIRED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "pretraining_tp": (1,),
    "partial_rotary_factor": (1, 1.0),
    "rope_interleaved": (False,),
    "mlp_bias": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
}
# Training, special tokens, bookkeeping of tools: nothing that the forward pass depends on.
_IGNORED = frozenset(
    (
        "_name_or_path",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "initializer_range",
        "attention_dropout",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "is_llama_config",
        "transformers.js_config",
        "unsloth_version",
        "unsloth_fixed",
        "return_dict",
        "return_dict_in_generate",
        "id2label",
        "label2id",
        "problem_type",
        "output_attentions",
        "output_hidden_states",
        "chunk_size_feed_forward",
        "is_decoder",
        "auto_map",
    )
)


def read_hf_config(folder: Path) -> ModelConfig:
    """Parse folder/config.json. Raises UnsupportedModel, or InvalidWeights when it is not a JSON object."""
    path = folder / "config.json"
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidWeights(f"{path.name} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidWeights(f"{path.name} is not a JSON object")
    return parse_hf_config(fields)


def parse_hf_config(fields: Fields) -> ModelConfig:
    """The configuration in a parsed config.json. Raises UnsupportedModel."""
    _refuse_unsupported(fields)
    heads = _integer(fields, "num_attention_heads")
    hidden = _integer(fields, "hidden_size")
    head_dim = _integer(fields, "head_dim", hidden // max(heads, 1))
    theta, scaling = _rope(fields)
    bias = bool(fields.get("attention_bias", False))
    return ModelConfig(
        architecture="llama",
        num_layers=_integer(fields, "num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=_integer(fields, "num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=_integer(fields, "intermediate_size"),
        vocab_size=_integer(fields, "vocab_size"),
        rms_norm_eps=_number(fields, "rms_norm_eps", 1e-6),
        rope=RopeConfig(theta, head_dim, scaling),
        max_positions=_integer(fields, "max_position_embeddings", 2048),
        tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
        attention_scale=head_dim**-0.5,
        qkv_bias=bias,
        output_bias=bias,
    )


def _refuse_unsupported(fields: Fields) -> None:
    model_type, architectures = fields.get("model_type"), fields.get("architectures") or ["LlamaForCausalLM"]
    if model_type != "llama" or architectures != ["LlamaForCausalLM"]:
        raise UnsupportedModel(f"architecture {model_type!r} {architectures}: only LlamaForCausalLM is supported")
    for name, value in fields.items():
        if name in _READ or name in _IGNORED or value is None:
            continue
        if name in _REQUIRED:
            if value not in _REQUIRED[name]:
                raise UnsupportedModel(f"config field {name} = {value!r}: only {_REQUIRED[name][0]!r} is supported")
        elif value is not False and value != {} and value != []:
            raise UnsupportedModel(f"config field {name} = {str(value)[:80]!r} is not supported")


def _rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    parameters = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    theta = _number(parameters, "rope_theta", _number(fields, "rope_theta", 10000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    known = {"rope_type", "type", "rope_theta"}
    scaling = None
    if kind == "linear":
        known |= {"factor"}
        scaling = RopeScaling("linear", factor=_number(parameters, "factor"))
    elif kind == "llama3":
        known |= {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
        scaling = RopeScaling(
            "llama3",
            factor=_number(parameters, "factor"),
            low_freq_factor=_number(parameters, "low_freq_factor"),
            high_freq_factor=_number(parameters, "high_freq_factor"),
            original_max_positions=_integer(parameters, "original_max_position_embeddings"),
        )
    elif kind != "default":
        raise UnsupportedModel(f"rope scaling {kind!r}: only default, linear and llama3 are supported")
    for name in sorted(parameters.keys() - known):
        if parameters[name] is not None and (name, parameters[name]) != ("partial_rotary_factor", 1.0):
            raise UnsupportedModel(f"rope field {name} = {parameters[name]!r} is not supported")
    return theta, scaling


def _integer(fields: Fields, name: str, default: int | None = None) -> int:
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool):
        raise UnsupportedModel(f"config field {name} = {value!r}: an integer is needed")
    return value


def _number(fields: Fields, name: str, default: float | None = None) -> float:
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UnsupportedModel(f"config field {name} = {value!r}: a number is needed")
    return float(value)
