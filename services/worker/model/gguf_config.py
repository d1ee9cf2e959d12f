"""ModelConfig from GGUF metadata of the `llama` architecture."""

from __future__ import annotations

from typing import Any

from services.worker.model.config import ModelConfig, RopeConfig, RopeScaling
from services.worker.model.errors import UnsupportedModel
from services.worker.model.gguf_file import GgufFile

ROPE_FACTORS = "rope_freqs.weight"
_PREFIX = "llama."
_READ = frozenset(
    (
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.freq_base",
        "rope.dimension_count",
        "rope.scaling.type",
        "rope.scaling.factor",
        "vocab_size",
    )
)
# Written beside a linear scaling or by older converters; no influence on the result.
_IGNORED = frozenset(("rope.scaling.original_context_length", "rope.scaling.finetuned", "tensor_data_layout"))


def parse_gguf_config(file: GgufFile) -> ModelConfig:
    """The configuration of a GGUF model. Raises UnsupportedModel naming what cannot be executed."""
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedModel(f"architecture {architecture!r}: only llama is supported in GGUF files")
    fields = {name[len(_PREFIX) :]: value for name, value in file.metadata.items() if name.startswith(_PREFIX)}
    for name in sorted(fields.keys() - _READ - _IGNORED):
        if fields[name]:
            raise UnsupportedModel(f"GGUF field {_PREFIX}{name} = {fields[name]!r} is not supported")
    heads, hidden = _integer(fields, "attention.head_count"), _integer(fields, "embedding_length")
    head_dim = _integer(fields, "attention.key_length", hidden // max(heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if _integer(fields, name, head_dim) != head_dim:
            raise UnsupportedModel(
                f"GGUF field {_PREFIX}{name} = {fields[name]}: only head_dim {head_dim} is supported"
            )
    return ModelConfig(
        architecture="llama",
        num_layers=_integer(fields, "block_count"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=_integer(fields, "attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=_integer(fields, "feed_forward_length"),
        vocab_size=_vocab_size(file, fields),
        rms_norm_eps=_decimal(float(fields.get("attention.layer_norm_rms_epsilon", 1e-5))),
        rope=RopeConfig(float(fields.get("rope.freq_base", 10000.0)), head_dim, _rope_scaling(file, fields)),
        max_positions=_integer(fields, "context_length"),
        tie_embeddings="output.weight" not in file.tensors,
        attention_scale=head_dim**-0.5,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
    )


def _rope_scaling(file: GgufFile, fields: dict[str, Any]) -> RopeScaling | None:
    kind = fields.get("rope.scaling.type", "none")
    if ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise UnsupportedModel(f"rope scaling {kind!r} together with {ROPE_FACTORS} is not supported")
        divisors = file.tensors[ROPE_FACTORS].dequantise().ravel()
        return RopeScaling("factors", frequency_divisors=tuple(float(value) for value in divisors))
    if kind == "none":
        return None
    if kind != "linear":
        raise UnsupportedModel(f"rope scaling {kind!r}: only none and linear are supported in GGUF files")
    return RopeScaling("linear", factor=float(fields["rope.scaling.factor"]))


def _vocab_size(file: GgufFile, fields: dict[str, Any]) -> int:
    embedding = file.tensors.get("token_embd.weight")
    return embedding.shape[0] if embedding else _integer(fields, "vocab_size")


def _decimal(value: float) -> float:
    """GGUF stores float32; the shortest decimal with that value is what its author wrote."""
    return float(f"{value:.6g}")


def _integer(fields: dict[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name, default)
    if not isinstance(value, int):
        raise UnsupportedModel(f"GGUF field {_PREFIX}{name} = {value!r}: an integer is needed")
    return value
