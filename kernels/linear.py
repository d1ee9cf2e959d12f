"""Linear layers whose rows never influence each other: the plain-torch form, and the packing of the compiled one.

Exact mode needs the same bits for a row whatever rows stand beside it. The compiled form has that by construction.
Torch takes other paths for other numbers of rows: in BF16 for a single one when k is large, hence the padding; in FP32
on some processors for any, so that each call has as many.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Of torch 2.13 on CPU: row counts that are multiples of this all give a row the same bits in BF16.
_BF16_MULTIPLE = 4
# Of each call in FP32; a row's bits do not depend on its place among them.
_F32_ROWS = 16
# Output columns of one panel of the packed form; gate and up alternate in halves of it.
PANEL_COLUMNS = 32
HALF_PANEL = PANEL_COLUMNS // 2


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, k] times weight [n, k] transposed, in their common dtype; float32 [T, n], bias float32 [n] added last."""
    rows = len(x)
    if x.dtype == torch.float32:
        padded = F.pad(x, (0, 0, 0, -rows % _F32_ROWS))
        starts = range(0, max(1, len(padded)), _F32_ROWS)
        product = torch.cat([F.linear(padded[start : start + _F32_ROWS], weight) for start in starts])[:rows]
    else:
        padded = F.pad(x, (0, 0, 0, -rows % _BF16_MULTIPLE))
        product = F.linear(padded, weight)[:rows].float()
    return product if bias is None else product + bias


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The gated activation silu(gate) * up, float32."""
    return F.silu(gate) * up


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Pack [n, k] into int32 words [ceil(n / 32), k / per word, 32]; a word is one float32 or two bfloat16 of a row.

    k must fill whole words. Missing columns of the last panel are zero.
    """
    rows = F.pad(weight, (0, 0, 0, -len(weight) % PANEL_COLUMNS)).contiguous()
    words = rows.view(torch.int32)
    return words.view(-1, PANEL_COLUMNS, words.shape[1]).transpose(1, 2).contiguous()


def interleave_gate_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Two [n, k] weights as one [2 n, k], sixteen rows of each in turn, so that one panel holds both operands."""
    return torch.stack((gate.view(-1, HALF_PANEL, gate.shape[1]), up.view(-1, HALF_PANEL, up.shape[1])), dim=1).view(
        2 * len(gate), gate.shape[1]
    )
