"""Everything of a model that the gateway needs: tokenizer, vocabulary, chat template, end-of-sequence tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from services.common.models import ModelSource
from services.common.settings import ConfigurationError
from services.common.tokenizer_digest import tokenizer_digest
from services.gateway.errors import InvalidRequest
from services.gateway.request import Sampling
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.gguf_tokenizer import end_tokens, load_gguf_tokenizer
from services.gateway.text.sampling_defaults import folder_defaults, gguf_defaults
from services.gateway.text.vocabulary import Vocabulary, build_vocabulary


@dataclass(frozen=True, slots=True)
class TextModel:
    """One model's text side. `digest` is compared with what its workers report."""

    name: str
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    chat_template: ChatTemplate | None
    eos_token_ids: tuple[int, ...]
    digest: bytes
    longest_token_bytes: int
    sampling_defaults: Sampling

    def encode_text(self, text: str) -> list[int]:
        """Tokens of a raw prompt: special tokens in it count, and the tokenizer's own (such as BOS) are added."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=True).ids
        return ids

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Tokens of a templated chat. Only the template's own special tokens count. Raises InvalidRequest."""
        if self.chat_template is None:
            raise InvalidRequest(f"the model {self.name} has no chat template; use completions", "messages")
        token_ids: list[int] = []
        self.tokenizer.encode_special_tokens = True
        try:
            for piece, is_special in self.chat_template.render(messages).pieces():
                if is_special:
                    token_id = self.tokenizer.token_to_id(piece)
                    assert token_id is not None
                    token_ids.append(token_id)
                else:
                    token_ids += self.tokenizer.encode(piece, add_special_tokens=False).ids
        finally:
            self.tokenizer.encode_special_tokens = False
        return token_ids

    def least_tokens(self, num_bytes: int) -> int:
        """A lower bound on the tokens of a text of `num_bytes`, known without tokenising it."""
        return num_bytes // self.longest_token_bytes


def load_text_model(source: ModelSource) -> TextModel:
    """Read the text side of an artifact. Raises ConfigurationError naming what is missing or not supported."""
    if source.is_gguf:
        tokenizer, metadata = load_gguf_tokenizer(source.path)
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        eos = end_tokens(metadata)
        variables = {
            f"{kind}_token": tokens[metadata[f"tokenizer.ggml.{kind}_token_id"]]
            for kind in ("bos", "eos")
            if _has(metadata, kind)
        }
        template = metadata.get("tokenizer.chat_template")
        defaults = gguf_defaults(source.name, metadata)
    else:
        tokenizer, eos, variables, template = _load_folder(source.path)
        defaults = folder_defaults(_read_json(source.path / "generation_config.json"))
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    vocabulary = build_vocabulary(tokenizer)
    return TextModel(
        name=source.name,
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        chat_template=ChatTemplate(template, special_tokens=special, variables=variables) if template else None,
        eos_token_ids=tuple(sorted(set(eos))),
        digest=tokenizer_digest(source),
        longest_token_bytes=max([len(token) for token in vocabulary.token_bytes] + [len(t.encode()) for t in special]),
        sampling_defaults=defaults,
    )


def _has(metadata: dict[str, Any], kind: str) -> bool:
    return f"tokenizer.ggml.{kind}_token_id" in metadata


def _load_folder(folder: Path) -> tuple[Tokenizer, list[int], dict[str, str], str | None]:
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
    variables = {kind: _content(config.get(kind)) for kind in ("bos_token", "eos_token") if config.get(kind)}
    eos: list[int | None] = [tokenizer.token_to_id(variables["eos_token"])] if "eos_token" in variables else []
    for name in ("generation_config.json", "config.json"):
        given = _read_json(folder / name).get("eos_token_id")
        eos += given if isinstance(given, list) else [given] if given is not None else []
    separate = folder / "chat_template.jinja"
    template = separate.read_text() if separate.is_file() else _default_template(config.get("chat_template"))
    return tokenizer, [token for token in eos if token is not None], variables, template


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


def _default_template(value: Any) -> str | None:
    """The template, or the one named "default" of a list of named ones."""
    if isinstance(value, list):
        return next((entry["template"] for entry in value if entry.get("name") == "default"), None)
    return value if isinstance(value, str) else None
