"""The arrays of one step on a device: what every Triton kernel reads in place of `PagedBatch`.

All arrays of a batch lie in one int32 buffer, each at a multiple of 64 bytes, so that a step is one copy to the device
and a captured CUDA graph finds them where they were: `pack` fills a (pinned) host buffer, `DeviceBatch.over` views a
device buffer of the same shape.

**Padding.** A graph's shape is fixed, a step is smaller. `padded` adds sequences of context 0 that own the added
tokens, one each while there are enough of them. Kernels then do nothing harmful: such a token's KV is written nowhere
(its write slot is -1), its attention is 0, and rows never influence each other. Added logit rows repeat row 0.

The host knows bounds, not values: launch grids are made from `max_query_len` and `max_context_len`, which a captured
graph sets to the largest it may see; what a program really has to do it reads from the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.batch import BLOCK_TOKENS, PagedBatch

_ALIGN_WORDS = 16


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Sizes of a batch's arrays: T tokens, S sequences, B table columns, L logit rows."""

    num_tokens: int
    num_seqs: int
    table_width: int
    num_logits: int

    @classmethod
    def of(cls, batch: PagedBatch) -> BatchShape:
        """The shape of a batch as it is."""
        return cls(batch.num_tokens, len(batch.context_lens), batch.block_tables.shape[1], len(batch.logit_rows))

    def parts(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Offset in words and shape of each array in the buffer, in DeviceBatch's order."""
        sizes: dict[str, tuple[int, ...]] = {
            "token_ids": (self.num_tokens,),
            "positions": (self.num_tokens,),
            "write_slots": (self.num_tokens,),
            "query_starts": (self.num_seqs + 1,),
            "context_lens": (self.num_seqs,),
            "block_tables": (self.num_seqs, self.table_width),
            "logit_rows": (self.num_logits,),
        }
        parts, offset = {}, 0
        for name, shape in sizes.items():
            parts[name] = (offset, shape)
            offset += _aligned(int(np.prod(shape)))
        return parts

    @property
    def num_words(self) -> int:
        """int32 words of the buffer."""
        offset, shape = list(self.parts().values())[-1]
        return offset + _aligned(int(np.prod(shape)))


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """One step's arrays, contiguous int32 on the device; see PagedBatch for their meaning.

    write_slots: [T], pool slot that receives the token's KV; -1: none, the token is padding. block_tables: entries
    beyond the context are 0. max_query_len, max_context_len: no sequence has more tokens in the step, in the pool.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    write_slots: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    logit_rows: torch.Tensor
    max_query_len: int
    max_context_len: int

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    @property
    def num_seqs(self) -> int:
        return self.context_lens.shape[0]

    @classmethod
    def over(cls, words: torch.Tensor, shape: BatchShape, *, max_query_len: int, max_context_len: int) -> DeviceBatch:
        """Views of a buffer of at least `shape.num_words` words; whoever owns it may fill it later."""
        views = {
            name: words[offset : offset + int(np.prod(size))].view(size)
            for name, (offset, size) in shape.parts().items()
        }
        return cls(**views, max_query_len=max_query_len, max_context_len=max_context_len)

    @classmethod
    def from_batch(cls, batch: PagedBatch, device: torch.device | str) -> DeviceBatch:
        """Copy a batch to the device, with exact bounds."""
        shape = BatchShape.of(batch)
        words = torch.zeros(shape.num_words, dtype=torch.int32)
        pack(batch, shape, words.numpy())
        return cls.over(
            words.to(device),
            shape,
            max_query_len=int(np.diff(batch.query_starts).max(initial=1)),
            max_context_len=int(batch.context_lens.max(initial=1)),
        )


def pack(batch: PagedBatch, shape: BatchShape, words: npt.NDArray[np.int32]) -> None:
    """Fill a host buffer with a batch, padded to `shape`. Raises ValueError where the batch does not fit."""
    full = padded(batch, shape)
    arrays = {
        "token_ids": full.token_ids,
        "positions": full.positions,
        "write_slots": write_slots(full),
        "query_starts": full.query_starts,
        "context_lens": full.context_lens,
        "block_tables": np.maximum(full.block_tables, 0),
        "logit_rows": full.logit_rows,
    }
    for name, (offset, size) in shape.parts().items():
        words[offset : offset + int(np.prod(size))] = arrays[name].reshape(-1)


def padded(batch: PagedBatch, shape: BatchShape) -> PagedBatch:
    """The batch with padding tokens, sequences, table columns and logit rows (module docstring)."""
    own = BatchShape.of(batch)
    tokens, seqs = shape.num_tokens - own.num_tokens, shape.num_seqs - own.num_seqs
    columns, rows = shape.table_width - own.table_width, shape.num_logits - own.num_logits
    if min(tokens, seqs, columns, rows) < 0 or (tokens and not seqs):
        raise ValueError(f"a batch of {own} does not fit {shape}")
    if own == shape:
        return batch
    ends = np.minimum(np.arange(1, seqs + 1), tokens)
    ends[-1:] = tokens
    return PagedBatch(
        token_ids=np.pad(batch.token_ids, (0, tokens)),
        positions=np.pad(batch.positions, (0, tokens)),
        query_starts=np.concatenate((batch.query_starts, own.num_tokens + ends)).astype(np.int32),
        context_lens=np.pad(batch.context_lens, (0, seqs)),
        block_tables=np.pad(batch.block_tables, ((0, seqs), (0, columns))),
        logit_rows=np.pad(batch.logit_rows, (0, rows)),
    )


def write_slots(batch: PagedBatch) -> npt.NDArray[np.int32]:
    """[T]: the pool slot each token's KV belongs to, -1 for the tokens of sequences of context 0."""
    seqs = np.repeat(np.arange(len(batch.context_lens)), np.diff(batch.query_starts))
    slots = batch.block_tables[seqs, batch.positions // BLOCK_TOKENS]
    return np.where(batch.context_lens[seqs] > 0, slots, -1).astype(np.int32)


def _aligned(words: int) -> int:
    return -(-words // _ALIGN_WORDS) * _ALIGN_WORDS
