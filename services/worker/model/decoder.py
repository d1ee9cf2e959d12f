"""What a runner needs of a decoder: one forward pass over a checked batch. Two implementations, one meaning.

`NativeDecoder` runs the compiled kernels; `TorchDecoder` is the same arithmetic in plain torch, for machines
without a compiler and as the reference in tests.
"""

from __future__ import annotations

from typing import Protocol

import torch

from kernels.batch import PagedBatch
from services.worker.model.adapter import AdapterTable


class Decoder(Protocol):
    """One model over one KV pool. Not thread-safe: one forward at a time."""

    @property
    def pool(self) -> torch.Tensor:
        """[blocks, kv_heads, layers, 2, 16, head_dim], over the memory the worker shares."""

    @property
    def backend(self) -> str:
        """Which arithmetic runs, for logs; replicas with the same backend agree to the last bit."""

    @property
    def adapters(self) -> AdapterTable:
        """Low-rank adapters that sequences of a batch may have."""

    def hidden(self) -> torch.Tensor:
        """Of the last pass: float32 [L, hidden size], the normalised states from which its logits were made."""

    def forward(self, batch: PagedBatch, num_threads: int) -> torch.Tensor:
        """Write the KV of the batch's tokens to the pool; float32 logits [L, vocab_size] of its logit_rows."""
