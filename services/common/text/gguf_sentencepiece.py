"""SentencePiece vocabularies of GGUF files (`tokenizer.ggml.model` = "llama": Llama 2, Mistral, Phi-3, Gemma).

SentencePiece joins the neighbours whose union has the highest score, the leftmost first. The same is done by byte-pair
merges in the order of falling scores, where every way to cut a piece into two pieces of the vocabulary is a merge; so
the tokenizers that model authors publish are made. No merge makes a control token: only its own text, or a chat
template, does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers

SPACE = "\u2581"
_UNKNOWN, _CONTROL, _BYTE = 2, 3, 6


def sentencepiece_tokenizer(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int], *, space_prefix: bool
) -> Tokenizer:
    """space_prefix: text begins with a space of its own, which decoding takes away."""
    vocab = {token: index for index, token in enumerate(tokens)}
    pieces = {token: i for token, i in vocab.items() if kinds[i] not in (_UNKNOWN, _CONTROL, _BYTE)}
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab, merges=_merges(pieces, scores), unk_token=unknown, fuse_unk=True, byte_fallback=_BYTE in kinds
        )
    )
    spaces: list[Any] = [normalizers.Replace(" ", SPACE)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), *spaces] if space_prefix else spaces)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if space_prefix else steps)
    return tokenizer


def _merges(vocab: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All cuts of all pieces, best score first; of one piece in the order of the left part, then of the right."""
    ranked: list[tuple[float, int, int, int, str, str]] = []
    for token, index in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[index], index, vocab[left], vocab[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
