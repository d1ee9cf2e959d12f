"""Bytes of every token, so that decoding is concatenation.

Two families of decoder are understood, named by the tokenizer itself: byte-level BPE, and SentencePiece style
(U+2581 for a space, `<0xNN>` for a byte). Any other stops the start. Special tokens have no text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from services.common.settings import ConfigurationError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for every byte: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """token_bytes[id] is the text of a token; strip_first_space: the whole text loses one leading space."""

    token_bytes: list[bytes] = field(repr=False)
    strip_first_space: bool

    def join(self, token_ids: Iterable[int]) -> bytes:
        """Bytes of a run of tokens; ids beyond the vocabulary (padding rows of a model) have no text."""
        table = self.token_bytes
        try:
            return b"".join([table[i] for i in token_ids])
        except IndexError:
            return b"".join([table[i] for i in token_ids if i < len(table)])

    def text_of(self, token_id: int) -> str:
        """One token for display; incomplete characters become U+FFFD."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes of one token."""
        return self.token_bytes[token_id] if token_id < len(self.token_bytes) else b""


def build_vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """The table of `tokenizer`. Raises ConfigurationError for a decoder it does not know."""
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
    steps = [decoder] if decoder.get("type") != "Sequence" else decoder["decoders"]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        alphabet = _byte_level_alphabet()
        return Vocabulary(_table(tokenizer, lambda token: _byte_level_bytes(token, alphabet)), False)
    if "ByteFallback" in kinds:
        return Vocabulary(_table(tokenizer, _sentencepiece_bytes), "Strip" in kinds)
    raise ConfigurationError(f"tokenizer decoder {kinds} not supported")


def _table(tokenizer: Tokenizer, to_bytes: Callable[[str], bytes]) -> list[bytes]:
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max([size - 1, *vocab.values()]) + 1)
    for token, token_id in vocab.items():
        if token_id not in special:
            table[token_id] = to_bytes(token)
    return table


def _byte_level_bytes(token: str, alphabet: dict[str, int]) -> bytes:
    """A token with a character outside the alphabet is an added one and stands for itself."""
    try:
        return bytes(map(alphabet.__getitem__, token))
    except KeyError:
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()
