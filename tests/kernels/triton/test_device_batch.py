"""A step's arrays in one buffer: what is padded, where tokens are written, and that graphs' shapes hold a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.batch import BLOCK_TOKENS
from kernels.triton.device_batch import BatchShape, DeviceBatch, pack, padded, write_slots
from tests.kernels.batches import make_batch


def test_arrays_arrive_as_they_were() -> None:
    batch = make_batch([(1, 40), (7, 7), (3, 20)], 16)
    found = DeviceBatch.from_batch(batch, "cpu")
    for name in ("token_ids", "positions", "query_starts", "context_lens", "logit_rows"):
        assert torch.equal(getattr(found, name), torch.from_numpy(getattr(batch, name)))
    assert torch.equal(found.block_tables, torch.from_numpy(batch.block_tables).clamp(min=0))
    assert (found.num_tokens, found.num_seqs, found.max_query_len, found.max_context_len) == (11, 3, 7, 40)


def test_each_array_is_aligned() -> None:
    shape = BatchShape(num_tokens=11, num_seqs=3, table_width=5, num_logits=2)
    for offset, _ in shape.parts().values():
        assert offset * 4 % 64 == 0
    assert shape.num_words * 4 % 64 == 0


def test_tokens_are_written_where_the_table_says() -> None:
    batch = make_batch([(5, 34), (1, 16)], 8)
    expected = [int(batch.block_tables[0, position // BLOCK_TOKENS]) for position in range(29, 34)]
    assert write_slots(batch).tolist() == [*expected, int(batch.block_tables[1, 0])]


@pytest.mark.parametrize(("tokens", "seqs", "starts"), [(4, 4, [0, 1, 2, 3, 4]), (7, 4, [0, 1, 2, 3, 7])])
def test_padding_owns_the_added_tokens_and_writes_nowhere(tokens: int, seqs: int, starts: list[int]) -> None:
    batch = make_batch([(1, 18), (1, 3)], 8)
    shape = BatchShape(tokens, seqs, 6, 4)
    full = padded(batch, shape)
    assert BatchShape.of(full) == shape
    assert full.query_starts.tolist() == starts
    assert full.context_lens.tolist() == [18, 3, 0, 0]
    assert (write_slots(full)[2:] == -1).all()
    assert (write_slots(full)[:2] >= 0).all()


def test_fewer_tokens_than_sequences_leave_some_empty() -> None:
    full = padded(make_batch([(2, 2)], 8), BatchShape(3, 4, 1, 0))
    assert full.query_starts.tolist() == [0, 2, 3, 3, 3]


def test_a_buffer_is_filled_again_under_the_same_views() -> None:
    shape = BatchShape(4, 4, 3, 4)
    words = torch.full((shape.num_words,), 77, dtype=torch.int32)
    view = DeviceBatch.over(words, shape, max_query_len=1, max_context_len=48)
    for sequences in ([(1, 40), (1, 16), (1, 1), (1, 2)], [(1, 5)]):
        batch = make_batch(sequences, 8)
        pack(batch, shape, words.numpy())
        assert view.context_lens.tolist() == [context for _, context in sequences] + [0] * (4 - len(sequences))
        assert view.write_slots.tolist() == write_slots(padded(batch, shape)).tolist()
        assert (view.block_tables >= 0).all()


@pytest.mark.parametrize("shape", [BatchShape(1, 2, 3, 0), BatchShape(3, 1, 2, 0), BatchShape(3, 2, 1, 0)])
def test_what_does_not_fit_is_refused(shape: BatchShape) -> None:
    """Too few tokens; a third token that nobody could own; too narrow a table."""
    batch = make_batch([(2, 20)], 8)
    with pytest.raises(ValueError, match="does not fit"):
        pack(batch, shape, np.zeros(1000, np.int32))
