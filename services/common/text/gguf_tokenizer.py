"""The tokenizer and chat template that a GGUF file carries in its metadata.

Byte-level BPE (`tokenizer.ggml.model` = "gpt2") and SentencePiece ("llama") are rebuilt as a `tokenizers.Tokenizer`.
`tokenizer.ggml.pre` names how the former cuts text before merging; a name that is not in the table below, or none,
stops the start instead of cutting wrongly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from services.common.gguf_metadata import read_metadata
from services.common.settings import ConfigurationError
from services.common.text.gguf_sentencepiece import sentencepiece_tokenizer

_CONTROL, _USER_DEFINED = 3, 4
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _cut_by(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_QWEN2_NAMES = ("qwen2", "deepseek-r1-qwen")
# Tokens that end a turn, by their text: files name one end token, and the models of these families have two.
_END_OF_TURN = frozenset(("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>"))


def _pre_tokenizer(name: str | None) -> Any:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("smollm", "refact", "starcoder", "command-r"):
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if name == "gpt-2":
        return gpt2
    if name in _LLAMA3_NAMES:
        return _cut_by(_LLAMA3)
    if name in _QWEN2_NAMES:
        return _cut_by(_QWEN2)
    raise ConfigurationError(f"tokenizer.ggml.pre={name!r}: pre-tokenizer not supported")


def load_gguf_tokenizer(path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer and the file's `tokenizer.` metadata. Raises ConfigurationError naming what is not supported."""
    metadata = read_metadata(path, ("tokenizer.", "general.sampling."))
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model not in ("gpt2", "llama"):
        raise ConfigurationError(
            f"model file {path}: tokenizer.ggml.model={model!r} not supported, only gpt2 and llama"
        )
    tokenizer = _byte_level(metadata, pre) if model == "gpt2" else _sentencepiece(path, metadata)
    tokens, kinds = metadata["tokenizer.ggml.tokens"], token_kinds(metadata)
    tokenizer.add_special_tokens(_added(tokens, kinds, _CONTROL, special=True))
    tokenizer.add_tokens(_added(tokens, kinds, _USER_DEFINED, special=False))
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    begins = model == "llama" or pre in _LLAMA3_NAMES
    if metadata.get("tokenizer.ggml.add_bos_token", begins) and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer, metadata


def end_tokens(metadata: dict[str, Any]) -> list[int]:
    """Ids of the tokens that end an answer: those the file names, and those that end a turn by their text."""
    named = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    kinds = token_kinds(metadata)
    turns = [
        index
        for index, token in enumerate(metadata["tokenizer.ggml.tokens"])
        if token in _END_OF_TURN and kinds[index] in (_CONTROL, _USER_DEFINED)
    ]
    return [token for token in named if token is not None] + turns


def token_kinds(metadata: dict[str, Any]) -> list[int]:
    """The kind of every token; normal where the file does not say."""
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(metadata["tokenizer.ggml.tokens"])
    return kinds


def _byte_level(metadata: dict[str, Any], pre: str | None) -> Tokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    # Llama 3 takes a word that is a token as that token, whatever its merges would make of it.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3_NAMES))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    if pre in _QWEN2_NAMES:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(path: Path, metadata: dict[str, Any]) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not scores:
        raise ConfigurationError(f"model file {path}: tokenizer.ggml.scores are missing")
    return sentencepiece_tokenizer(
        metadata["tokenizer.ggml.tokens"],
        scores,
        token_kinds(metadata),
        space_prefix=metadata.get("tokenizer.ggml.add_space_prefix", True),
    )


def _added(tokens: list[str], kinds: list[int], kind: int, *, special: bool) -> list[AddedToken]:
    return [
        AddedToken(token, special=special, normalized=False)
        for token, own in zip(tokens, kinds, strict=True)
        if own == kind
    ]
