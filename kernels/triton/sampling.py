"""Launcher of draws over whole vocabularies; kernels/sampling.py is the specification."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from kernels.sampling import SamplingRows
from kernels.triton.registry import KernelConfig, pointer
from kernels.triton.sampling_kernel import draw_kernel, highest_kernel


@dataclass(frozen=True, slots=True)
class Tables:
    """Launch configuration. chunk: tokens of one program of the first kernel; block: of one step of the second.

    capacity: tokens a row may have gathered.
    """

    chunk: int
    block: int
    capacity: int
    chunk_warps: int
    block_warps: int


TABLES = Tables(chunk=4096, block=2048, capacity=4096, chunk_warps=8, block_warps=16)


def draw_tokens(logits: torch.Tensor, rows: SamplingRows, tables: Tables = TABLES) -> torch.Tensor:
    """One token of each row of float32 logits [R, V]: int32 [R], -1 where a row's logits are not numbers."""
    count, size = logits.shape
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or not size:
        raise ValueError(f"{logits.dtype} logits {tuple(logits.shape)}: must be float32 with contiguous rows")
    device, chunks = logits.device, triton.cdiv(size, tables.chunk)
    out = torch.empty(count, dtype=torch.int32, device=device)
    if not count:
        return out
    highest = torch.empty(count, chunks, dtype=torch.float32, device=device)
    best = torch.empty(count, chunks, dtype=torch.int32, device=device)
    highest_kernel[(count, chunks)](
        logits, highest, best, size, logits.stride(0), CHUNK=tables.chunk, num_warps=tables.chunk_warps
    )
    draw_kernel[(count,)](
        logits,
        highest,
        best,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.share,
        torch.empty(count, tables.capacity, dtype=torch.float32, device=device),
        torch.empty(count, tables.capacity, dtype=torch.int32, device=device),
        out,
        size,
        logits.stride(0),
        chunks,
        CHUNKS=triton.next_power_of_2(chunks),
        BLOCK=tables.block,
        CAPACITY=tables.capacity,
        num_warps=tables.block_warps,
    )
    return out


_FLOATS, _INTS = pointer(torch.float32), pointer(torch.int32)
SHIPPED = [
    KernelConfig(
        "sampling-highest",
        highest_kernel,
        {"logits_ptr": _FLOATS, "highest_ptr": _FLOATS, "token_ptr": _INTS, "size": "i32", "stride": "i32"},
        {"CHUNK": TABLES.chunk},
        ("logits_ptr", "highest_ptr", "token_ptr", "size", "stride"),
        num_warps=TABLES.chunk_warps,
    ),
    KernelConfig(
        "sampling-draw",
        draw_kernel,
        {
            **dict.fromkeys(("logits_ptr", "highest_ptr", "gathered_ptr"), _FLOATS),
            **dict.fromkeys(("best_ptr", "top_k_ptr", "token_ptr", "out_ptr"), _INTS),
            **dict.fromkeys(("temperature_ptr", "top_p_ptr", "min_p_ptr", "share_ptr"), "*fp64"),
            **dict.fromkeys(("size", "stride", "chunks"), "i32"),
        },
        {"CHUNKS": 32, "BLOCK": TABLES.block, "CAPACITY": TABLES.capacity},
        ("logits_ptr", "highest_ptr", "best_ptr", "gathered_ptr", "token_ptr", "size", "stride"),
        num_warps=TABLES.block_warps,
    ),
]
