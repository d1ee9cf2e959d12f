"""Finds where the latest tokens of a text stood before, and proposes what followed them there. Pure.

Prompt lookup decoding (A. Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding). There the whole text is
searched at every token; here the place after each n-gram is kept in a hash table without buckets: a token costs one
entry, a later n-gram takes the place of an earlier one, and what is found is compared with the text before it counts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

# Lengths of the n-grams that are looked for, the longest first: a longer match is more often right.
_SIZES = (4, 2)
# Entries of a table, 4 bytes each: of longer texts the older n-grams are overwritten.
_MAX_ENTRIES = 2**14
# Its products spread over the upper bits (Knuth, The Art of Computer Programming 3, 6.4).
_FACTOR = 0x9E3779B97F4A7C15
_WORD = 2**64 - 1
# So many n-grams are entered one by one: an array operation costs more than one of them.
_FEW = 16
_NONE = np.empty(0, dtype=np.int32)


class PromptLookup:
    """The index of one growing text."""

    def __init__(self, capacity: int) -> None:
        """capacity: most tokens of the text."""
        bits = (min(2 * capacity, _MAX_ENTRIES) - 1).bit_length()
        self._shift = 64 - bits
        # Where the token after an n-gram stands; 0: nowhere.
        self._tables = {size: np.zeros(2**bits, dtype=np.int32) for size in _SIZES}
        self._num_indexed = 0

    @property
    def num_bytes(self) -> int:
        """Memory of the tables."""
        return sum(table.nbytes for table in self._tables.values())

    def propose(self, tokens: Int32Array, num_tokens: int, most: int) -> Int32Array:
        """Up to `most` tokens that may follow tokens[:num_tokens], a text that goes on from that of the last call.

        Where the earlier place is so near that its continuation runs into the end, it is taken to repeat itself.
        """
        self._index(tokens, num_tokens)
        for size, table in self._tables.items():
            if num_tokens <= size:
                continue
            latest = tokens[num_tokens - size : num_tokens].tolist()
            place = int(table[self._hash(latest)])
            if place and tokens[place - size : place].tolist() == latest:
                proposed: Int32Array = tokens[place + np.arange(most) % (num_tokens - place)]
                return proposed
        return _NONE

    def _index(self, tokens: Int32Array, num_tokens: int) -> None:
        """Enter the n-grams that a known token follows and that are not entered yet."""
        for size, table in self._tables.items():
            first = max(self._num_indexed, size)
            if num_tokens - first <= _FEW:
                for place in range(first, num_tokens):
                    table[self._hash(tokens[place - size : place].tolist())] = place
            else:
                table[self._hashes(tokens[first - size : num_tokens - 1], size)] = np.arange(first, num_tokens)
        self._num_indexed = num_tokens

    def _hash(self, ngram: list[int]) -> int:
        mixed = 0
        for token in ngram:
            mixed = (mixed + token + 1) * _FACTOR & _WORD
        return mixed >> self._shift

    def _hashes(self, tokens: Int32Array, size: int) -> npt.NDArray[np.uint64]:
        """`_hash` of each n-gram of `tokens`."""
        count = len(tokens) - size + 1
        mixed = np.zeros(count, dtype=np.uint64)
        for offset in range(size):
            mixed = (mixed + tokens[offset : offset + count].astype(np.uint64) + np.uint64(1)) * np.uint64(_FACTOR)
        return mixed >> np.uint64(self._shift)
