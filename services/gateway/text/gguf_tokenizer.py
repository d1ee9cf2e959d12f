"""The tokenizer and chat template that a GGUF file carries in its metadata.

Byte-level BPE (`tokenizer.ggml.model` = "gpt2") is rebuilt as a `tokenizers.Tokenizer`. `tokenizer.ggml.pre` names
how text is cut before merging; a name that is not in the table below stops the start instead of cutting wrongly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from services.common.gguf_metadata import read_metadata
from services.common.settings import ConfigurationError

_CONTROL, _USER_DEFINED = 3, 4
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _cut_by(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _pre_tokenizer(name: str) -> Any:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("smollm", "refact", "starcoder", "command-r"):
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if name in ("gpt-2", "default"):
        return gpt2
    if name in ("llama-bpe", "llama3", "llama-v3"):
        return _cut_by(_LLAMA3)
    if name == "qwen2":
        return _cut_by(_QWEN2)
    raise ConfigurationError(f"tokenizer.ggml.pre={name!r}: pre-tokenizer not supported")


def load_gguf_tokenizer(path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer and the file's `tokenizer.` metadata. Raises ConfigurationError naming what is not supported."""
    metadata = read_metadata(path, ("tokenizer.", "general.sampling."))
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ConfigurationError(f"model file {path}: tokenizer.ggml.model={model!r} not supported, only 'gpt2'")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(metadata.get("tokenizer.ggml.pre", "default"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_added(tokens, kinds, _CONTROL, special=True))
    tokenizer.add_tokens(_added(tokens, kinds, _USER_DEFINED, special=False))
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token") and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer, metadata


def _added(tokens: list[str], kinds: list[int], kind: int, *, special: bool) -> list[AddedToken]:
    return [
        AddedToken(token, special=special, normalized=False)
        for token, own in zip(tokens, kinds, strict=True)
        if own == kind
    ]
