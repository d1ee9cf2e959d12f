"""Incremental detokenising: token ids in, whole characters out. Pure and synchronous.

Invariant (tests/gateway/test_detokenizer.py): the concatenation of all that `push` and `finish` return equals the
decoding of all tokens at once, however they were grouped, and no part of a character is ever returned.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from services.gateway.text.vocabulary import Vocabulary

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """State of one choice: the bytes of a character that has only begun."""

    __slots__ = ("_decoder", "_strip", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = _new_decoder("replace")
        self._strip = vocabulary.strip_first_space

    def push(self, token_ids: Iterable[int]) -> str:
        """Characters that these tokens complete."""
        return self._stripped(self._decoder.decode(self._vocabulary.join(token_ids)))

    def finish(self) -> str:
        """What is left: U+FFFD when the output ends inside a character."""
        return self._stripped(self._decoder.decode(b"", True))

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


def decode_all(vocabulary: Vocabulary, token_ids: Iterable[int]) -> str:
    """Text of a whole run of tokens."""
    detokenizer = Detokenizer(vocabulary)
    return detokenizer.push(token_ids) + detokenizer.finish()
