"""What an artifact says of its text: tokenizer, end tokens, chat template, and what its makers recommend for sampling.

Of a GGUF file its metadata, of a Hugging Face folder its files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from services.common.models import ModelSource
from services.common.settings import ConfigurationError
from services.common.text.gguf_tokenizer import end_tokens, load_gguf_tokenizer

# What artifacts call the template of chats with tools.
_TOOL_USE = "tool_use"


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """eos_token_ids: of the tokens that end an answer, rising. variables: what templates expect beside messages.

    tool_template: of chats with tools, where it is another one. sampling: what the artifact recommends, in its own
    terms: `general.sampling.*`, or generation_config.json.
    """

    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    variables: dict[str, str]
    template: str | None
    tool_template: str | None
    sampling: Mapping[str, Any]


def load_tokenizer(source: ModelSource) -> ModelTokenizer:
    """Raises ConfigurationError naming what is missing or not supported."""
    return _of_gguf(source.path) if source.is_gguf else _of_folder(source.path)


def _of_gguf(path: Path) -> ModelTokenizer:
    tokenizer, metadata = load_gguf_tokenizer(path)
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    named = {kind: metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos")}
    return ModelTokenizer(
        tokenizer,
        tuple(sorted(set(end_tokens(metadata)))),
        {f"{kind}_token": tokens[token] for kind, token in named.items() if token is not None},
        metadata.get("tokenizer.chat_template"),
        metadata.get(f"tokenizer.chat_template.{_TOOL_USE}"),
        metadata,
    )


def _of_folder(folder: Path) -> ModelTokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigurationError(f"model folder {folder}: no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ConfigurationError(f"{file}: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    generation = _read_json(folder / "generation_config.json")
    variables = {kind: _content(config.get(kind)) for kind in ("bos_token", "eos_token") if config.get(kind)}
    eos: list[int | None] = [tokenizer.token_to_id(variables["eos_token"])] if "eos_token" in variables else []
    for given in (generation.get("eos_token_id"), _read_json(folder / "config.json").get("eos_token_id")):
        eos += given if isinstance(given, list) else [given] if given is not None else []
    named = config.get("chat_template")
    template = _read_text(folder / "chat_template.jinja") or _template(named, "default")
    tool_template = _read_text(folder / "additional_chat_templates" / f"{_TOOL_USE}.jinja") or _named(named, _TOOL_USE)
    ids = tuple(sorted({token for token in eos if token is not None}))
    return ModelTokenizer(tokenizer, ids, variables, template, tool_template, generation)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}") from None
    return value if isinstance(value, dict) else {}


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _read_text(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None


def _template(value: Any, name: str) -> str | None:
    """The template, or the one of that name of a list of named ones."""
    return value if isinstance(value, str) else _named(value, name)


def _named(value: Any, name: str) -> str | None:
    entries = value if isinstance(value, list) else ()
    return next((entry["template"] for entry in entries if entry.get("name") == name), None)
