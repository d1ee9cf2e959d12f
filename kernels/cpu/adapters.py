"""One layer of a low-rank adapter as the compiled kernels read it: panels of sixteen columns (kernels/cpu/src/lora.h).

The projections that a linear layer joins share their input, so their down matrices stand below each other and are one
product. Ranks are filled up with zeros, which changes no sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from kernels.cpu.huge_pages import HugePages
from kernels.cpu.structs import AdapterInputStruct, AdapterPartStruct
from kernels.lora import LowRank

SIXTEEN = 16
_WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class Place:
    """Where a projection's outputs lie among those of its linear layer.

    first: column of its first output. step: columns from sixteen of them to the next sixteen.
    """

    first: int
    step: int = SIXTEEN


def pack_input(
    parts: Sequence[tuple[LowRank, Place]], memory: HugePages
) -> tuple[AdapterInputStruct, list[torch.Tensor]]:
    """The adapted projections of one linear layer by address, and the tensors, in `memory`, that must live as long.

    Outputs of each are a multiple of 16; down and up have the dtype of the layer's inputs.
    """
    struct = AdapterInputStruct()
    if not parts:
        return struct, []
    padded = [_whole_words(matrices) for matrices, _ in parts]
    # A step reads the down matrices first.
    tensors = [memory.copy(pack_sixteens(torch.cat([one.down for one in padded])))]
    struct.down, struct.ranks, struct.num_parts = tensors[0].data_ptr(), len(tensors[0]) * SIXTEEN, len(parts)
    low = 0
    for number, (one, (_, place)) in enumerate(zip(padded, parts, strict=True)):
        up = memory.copy(pack_sixteens(one.up))
        rank = len(one.down)
        struct.parts[number] = AdapterPartStruct(
            up.data_ptr(), len(one.up), rank, low, place.first, place.step, one.scaling
        )
        low += rank
        tensors.append(up)
    return struct, tensors


def _whole_words(matrices: LowRank) -> LowRank:
    """With zeros for the rank that a word has beyond them."""
    missing = -matrices.up.shape[1] % (_WORD_BYTES // matrices.up.element_size())
    return replace(matrices, down=F.pad(matrices.down, (0, 0, 0, missing)), up=F.pad(matrices.up, (0, missing)))


def pack_sixteens(weight: torch.Tensor) -> torch.Tensor:
    """Pack [n, k] into int32 words [ceil(n / 16), k / values of a word, 16]; k must fill whole words."""
    rows = F.pad(weight, (0, 0, 0, -len(weight) % SIXTEEN)).contiguous()
    words = rows.view(torch.int32)
    return words.view(-1, SIXTEEN, words.shape[1]).transpose(1, 2).contiguous()
