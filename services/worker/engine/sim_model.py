"""What a simulated replica takes from a model's artifact: its shape, and words of its vocabulary. No weights, no torch.

Of a GGUF file only the header is read, of a Hugging Face folder config.json and tokenizer.json.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from services.common.gguf_metadata import read_metadata
from services.common.models import ModelSource
from services.common.settings import ConfigurationError

# A space, as byte-level and SentencePiece vocabularies write it, and a word that no stop string or marker looks like.
_WORD = re.compile(r"[Ġ▁][a-z]{3,12}")
_MAX_WORDS = 1024
_TOKENS = "tokenizer.ggml.tokens"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model; context_length: tokens, as the artifact states it."""

    vocab_size: int
    context_length: int
    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class SimModel:
    """words: token ids that are printable words with a space before them."""

    shape: ModelShape
    words: tuple[int, ...]


def read_sim_model(source: ModelSource) -> SimModel:
    """Raises ConfigurationError naming the file and what is missing or wrong in it."""
    shape, tokens = _read_gguf(source.path) if source.is_gguf else _read_folder(source.path)
    for field in fields(shape):
        if getattr(shape, field.name) < 1:
            raise ConfigurationError(f"model {source.path}: {field.name} = {getattr(shape, field.name)}")
    words = _words(tokens, shape.vocab_size)
    if not words:
        raise ConfigurationError(f"model {source.path}: its vocabulary has no plain words to simulate answers with")
    return SimModel(shape, words)


def _words(tokens: Iterable[tuple[str, int]], vocab_size: int) -> tuple[int, ...]:
    found = (index for text, index in tokens if index < vocab_size and _WORD.fullmatch(text))
    return tuple(index for index, _ in zip(found, range(_MAX_WORDS), strict=False))


def _read_gguf(path: Path) -> tuple[ModelShape, Iterator[tuple[str, int]]]:
    architecture = str(read_metadata(path, ("general.architecture",)).get("general.architecture", ""))
    found = read_metadata(path, (f"{architecture}.", _TOKENS))
    tokens: list[str] = found.get(_TOKENS) or []

    def number(key: str, default: int | None = None) -> int:
        return _number(path, found, f"{architecture}.{key}", default)

    heads = number("attention.head_count")
    return ModelShape(
        vocab_size=len(tokens),
        context_length=number("context_length"),
        num_layers=number("block_count"),
        num_kv_heads=number("attention.head_count_kv", heads),
        head_dim=number("attention.key_length", number("embedding_length") // max(heads, 1)),
    ), ((text, index) for index, text in enumerate(tokens))


def _read_folder(path: Path) -> tuple[ModelShape, Iterator[tuple[str, int]]]:
    config = _read_json(path / "config.json")
    # Models that read images too keep the language model's sizes apart.
    text = config.get("text_config", config)
    vocabulary = _read_json(path / "tokenizer.json").get("model", {}).get("vocab", {})
    pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((v[0], i) for i, v in enumerate(vocabulary))

    def number(key: str, default: int | None = None) -> int:
        return _number(path, text, key, default)

    heads = number("num_attention_heads")
    return ModelShape(
        vocab_size=number("vocab_size"),
        context_length=number("max_position_embeddings"),
        num_layers=number("num_hidden_layers"),
        num_kv_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", number("hidden_size") // max(heads, 1)),
    ), iter(sorted(pairs, key=lambda pair: pair[1]))


def _number(path: Path, found: Mapping[str, Any], key: str, default: int | None) -> int:
    """An integer, of a list (one for each layer) the largest; absent or null: the default."""
    value = found.get(key)
    if isinstance(value, list) and value:
        value = max(value)
    if value is None:
        value = default
    if not isinstance(value, int):
        raise ConfigurationError(f"model {path}: {key} = {value!r} is no number")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"model file {path}: {error}") from None
