"""ModelConfig from a Hugging Face config.json.

Fields are known to matter, known not to, or unknown. An unknown field that is set to something refuses the model: it
may change what the model computes. hf_families.py says which fields matter to which family.
"""

from __future__ import annotations

import json
from pathlib import Path

from services.common.artifacts.regular_file import read_document
from services.worker.model.config import ModelConfig
from services.worker.model.errors import InvalidWeights, UnsupportedModel
from services.worker.model.hf_families import FAMILIES, Family
from services.worker.model.hf_fields import Fields, boolean, integer, not_negative, num_layers, shown
from services.worker.model.hf_parts import head_dim_of
from services.worker.model.rope import extended_positions

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
        "partial_rotary_factor",
        "max_position_embeddings",
        "tie_word_embeddings",
        "model_type",
        "architectures",
    )
)
# Of no family is anything else implemented; an absent field means the same.
_ONLY: dict[str, tuple[object, ...]] = {"is_encoder_decoder": (False,), "add_cross_attention": (False,)}
# Training, special tokens, sampling, bookkeeping of tools: nothing that the forward pass depends on.
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
        "cache_implementation",
        "tokenizer_class",
        "_attn_implementation_autoset",
        "do_sample",
        "max_length",
        "temperature",
        "top_k",
        "top_p",
        "repetition_penalty",
    )
)


# A model that reads images too; its text part is executed as the family on the right.
_WRAPPERS = {"gemma3": ("Gemma3ForConditionalGeneration", "gemma3_text")}


def read_hf_config(folder: Path) -> ModelConfig:
    """Parse folder/config.json. Raises UnsupportedModel, or InvalidWeights when it is not a JSON object."""
    path = folder / "config.json"
    try:
        fields = json.loads(read_document(path))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidWeights(f"{path.name} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidWeights(f"{path.name} is not a JSON object")
    return parse_hf_config(fields)


def parse_hf_config(fields: Fields) -> ModelConfig:
    """The configuration in a parsed config.json. Raises UnsupportedModel."""
    fields = _text_part(fields)
    family = _family(fields)
    _refuse_unsupported(fields, family)
    fields = {**family.defaults, **fields}
    head_dim = head_dim_of(fields)
    parts = family.build(fields, head_dim)
    return ModelConfig(
        architecture=family.architecture,
        num_layers=num_layers(fields),
        hidden_size=integer(fields, "hidden_size"),
        num_heads=integer(fields, "num_attention_heads"),
        num_kv_heads=integer(fields, "num_key_value_heads", integer(fields, "num_attention_heads")),
        head_dim=head_dim,
        intermediate_size=integer(fields, "intermediate_size"),
        vocab_size=integer(fields, "vocab_size"),
        rms_norm_eps=not_negative(fields, "rms_norm_eps"),
        max_positions=extended_positions(integer(fields, "max_position_embeddings"), parts["rope"]),
        tie_embeddings=boolean(fields, "tie_word_embeddings"),
        **parts,
    )


def _text_part(fields: Fields) -> Fields:
    """The fields of the language model inside a model that reads images too; others as they are."""
    _refuse_quantised(fields)
    class_name, model_type = _WRAPPERS.get(str(fields.get("model_type")), (None, None))
    if class_name is None or fields.get("architectures") != [class_name]:
        return fields
    text = fields.get("text_config")
    if not isinstance(text, dict):
        raise UnsupportedModel(f"config field text_config = {shown(text)}: an object is needed")
    tied = {"tie_word_embeddings": fields["tie_word_embeddings"]} if "tie_word_embeddings" in fields else {}
    return {**tied, **text, "model_type": text.get("model_type", model_type), "architectures": None}


def _refuse_quantised(fields: Fields) -> None:
    quantisation = fields.get("quantization_config") or fields.get("compression_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
        raise UnsupportedModel(f"config field quantization_config: {shown(method)} weights are not supported")


def _family(fields: Fields) -> Family:
    model_type, architectures = fields.get("model_type"), fields.get("architectures")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None or (architectures or [family.class_name]) != [family.class_name]:
        known = ", ".join(sorted(family.class_name for family in FAMILIES.values()))
        raise UnsupportedModel(f"architecture {shown(model_type)} {shown(architectures)}: supported are {known}")
    return family


def _refuse_unsupported(fields: Fields, family: Family) -> None:
    only = {**_ONLY, **family.only}
    for name, value in fields.items():
        if name in _READ or name in family.reads or name in _IGNORED or value is None:
            continue
        if name in only:
            if value not in only[name]:
                raise UnsupportedModel(f"config field {name} = {shown(value)}: only {only[name][0]!r} is supported")
        elif value is not False and value != {} and value != []:
            raise UnsupportedModel(f"config field {name} = {shown(value)} is not supported")
