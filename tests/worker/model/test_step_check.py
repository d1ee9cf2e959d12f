"""A malformed step is refused with a ValueError and leaves the pool as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.model.runner import CpuRunner

from .steps import Chunk, make_step

GOOD = make_step([Chunk([5, 6, 7], 0, [40]), Chunk([8], 17, [41, 42])])


def int32(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)


MALFORMED = {
    "int64 tokens": ({"token_ids": GOOD.token_ids.astype(np.int64)}, "token_ids is not an int32"),
    "a list": ({"token_ids": [1, 2, 3, 4]}, "token_ids is not an int32"),
    "flat tables": ({"block_tables": int32(40, 41)}, "block_tables has 1 dimensions"),
    "token outside the vocabulary": ({"token_ids": int32(5, 6, 49152, 8)}, "vocabulary"),
    "negative token": ({"token_ids": int32(5, -1, 7, 8)}, "vocabulary"),
    "fewer positions": ({"positions": int32(0, 1, 2)}, "3 positions for 4 tokens"),
    "gap in positions": ({"positions": int32(0, 1, 3, 17)}, "positions are not"),
    "no tokens": ({name: int32() for name in ("token_ids", "positions", "logit_rows")}, "no tokens"),
    "starts do not end": ({"query_starts": int32(0, 3, 3)}, "query_starts do not divide"),
    "starts do not begin": ({"query_starts": int32(1, 3, 4)}, "query_starts do not divide"),
    "starts descend": ({"query_starts": int32(0, 5, 4)}, "query_starts do not divide"),
    "missing start": ({"query_starts": int32(0, 4)}, "2 query_starts"),
    "context shorter than queries": ({"context_lens": int32(2, 18)}, "shorter than the queries"),
    "context too long": ({"context_lens": int32(3, 2049)}, "longer than the 2048 served"),
    "slot outside the pool": ({"block_tables": np.array([[40, -1], [41, 300]], np.int32)}, "outside the 300 slots"),
    "missing slot": ({"block_tables": np.array([[40, -1], [41, -1]], np.int32)}, "outside the 300 slots"),
    "missing table": ({"block_tables": np.array([[40, -1]], np.int32)}, "1 block tables"),
    "narrow table": ({"block_tables": np.array([[40], [41]], np.int32)}, "too narrow"),
    "logit row outside": ({"logit_rows": int32(4)}, "logit_rows outside"),
    "shared write": (
        {
            "positions": int32(0, 1, 2, 0),
            "context_lens": int32(3, 1),
            "block_tables": np.array([[40], [40]], np.int32),
        },
        "same place",
    ),
}


@pytest.mark.parametrize(("changes", "message"), MALFORMED.values(), ids=MALFORMED.keys())
def test_refused(runner_bf16: CpuRunner, changes: dict[str, Any], message: str) -> None:
    pool = runner_bf16.decoder.pool
    before = pool[40:43].clone()
    with pytest.raises(ValueError, match=message):
        runner_bf16.submit(replace(GOOD, **changes))
    with pytest.raises(RuntimeError, match="no step"):
        runner_bf16.collect()
    assert torch.equal(pool[40:43].view(torch.int16), before.view(torch.int16))


def test_the_same_step_is_accepted(runner_bf16: CpuRunner) -> None:
    runner_bf16.submit(GOOD)
    with pytest.raises(RuntimeError, match="already in flight"):
        runner_bf16.submit(GOOD)
    assert runner_bf16.collect().shape == (4, 49152)


def test_no_logits_wanted(runner_bf16: CpuRunner) -> None:
    runner_bf16.submit(replace(GOOD, logit_rows=int32()))
    assert runner_bf16.collect().shape == (0, 49152)


def test_arrays_may_be_reused_after_submit(runner_bf16: CpuRunner) -> None:
    runner_bf16.submit(GOOD)
    expected = runner_bf16.collect()
    step = replace(GOOD, token_ids=GOOD.token_ids.copy())
    runner_bf16.submit(step)
    step.token_ids[:] = 0
    assert torch.equal(runner_bf16.collect(), expected)
