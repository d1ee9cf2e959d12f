"""The unpacking of INT4 weights in assembly, which the interpreter never runs: its instructions worked out by hand."""

from __future__ import annotations

import re

import pytest
import torch

from kernels.triton import weight_tiles


def floats(word: int, dtype: torch.dtype) -> torch.Tensor:
    """The two 16-bit floats of a register, the lower half first."""
    return torch.tensor([word - (word >> 31 << 32)], dtype=torch.int32).view(dtype).double()


def permuted(a: int, b: int, selector: int) -> int:
    chosen = (a | b << 32).to_bytes(8, "little")
    return int.from_bytes(bytes(chosen[selector >> 4 * i & 7] for i in range(4)), "little")


def run(assembly: str, word: int, dtype: torch.dtype) -> list[float]:
    """What the four outputs hold, for the instructions that the assembly uses."""
    registers: dict[str, int] = {"$2": word}
    results: dict[str, torch.Tensor] = {}
    for line in re.findall(r"^\s*([a-z][\w.]*) (.*);", assembly, re.MULTILINE):
        operation, (target, *names) = line[0], line[1].split(", ")
        values = [registers[name] if name in registers else int(name, 0) for name in names]
        match operation.split(".")[0]:
            case "shr":
                registers[target] = values[0] >> values[1]
            case "and":
                registers[target] = values[0] & values[1]
            case "mov":
                registers[target] = values[0]
            case "prmt":
                registers[target] = permuted(*values)
            case "fma":
                a, b, c = (floats(value, dtype) for value in values)
                results[target] = a * b + c
    return torch.cat((results["$0"], results["$1"])).tolist()


@pytest.mark.parametrize(
    ("assembly", "shift", "dtype"),
    [
        (weight_tiles._LOW_BF16, 0, torch.bfloat16),
        (weight_tiles._HIGH_BF16, 4, torch.bfloat16),
        (weight_tiles._LOW_FP16, 0, torch.float16),
        (weight_tiles._HIGH_FP16, 4, torch.float16),
    ],
    ids=["low-bf16", "high-bf16", "low-fp16", "high-fp16"],
)
def test_four_bytes_become_four_floats_in_order(assembly: object, shift: int, dtype: torch.dtype) -> None:
    for first in range(0, 256, 4):
        packed = bytes([first, 255 - first, first ^ 0x5A, (first * 7) % 256])
        expected = [float((byte >> shift & 15) - 8) for byte in packed]
        assert run(assembly.value, int.from_bytes(packed, "little"), dtype) == expected
