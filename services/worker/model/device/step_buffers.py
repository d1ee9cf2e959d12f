"""The memory through which a step's arrays go to a device and its logits come back: pinned where that exists."""

from __future__ import annotations

import torch

from kernels.batch import PagedBatch
from kernels.triton.device_batch import BatchShape, DeviceBatch, pack


class StepBuffers:
    """For one step at a time; every buffer grows to what the largest step needs and stays.

    Two buffers of logits alternate, so that those of a step live until the one after the next is submitted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._words = torch.empty(0, dtype=torch.int32)
        self._device_words = torch.empty(0, dtype=torch.int32, device=device)
        self._logits = [torch.empty(0), torch.empty(0)]
        self._turn = 0

    def fill(self, batch: PagedBatch, shape: BatchShape, target: torch.Tensor) -> None:
        """Pack a batch, padded to `shape`, and begin its copy to words on the device. The last copy has ended."""
        count = shape.num_words
        if count > len(self._words):
            self._words = torch.zeros(2 * count, dtype=torch.int32, pin_memory=self._pinned)
        pack(batch, shape, self._words.numpy())
        target[:count].copy_(self._words[:count], non_blocking=True)

    def upload(self, batch: PagedBatch) -> DeviceBatch:
        """A batch in its own shape. Called on the lane of steps, the earlier of which are over."""
        shape = BatchShape.of(batch)
        if shape.num_words > len(self._device_words):
            self._device_words = torch.zeros(2 * shape.num_words, dtype=torch.int32, device=self._device)
        self.fill(batch, shape, self._device_words)
        lengths = batch.query_starts[1:] - batch.query_starts[:-1]
        return DeviceBatch.over(
            self._device_words,
            shape,
            max_query_len=int(lengths.max()),
            max_context_len=int(batch.context_lens.max()),
        )

    def download(self, logits: torch.Tensor) -> torch.Tensor:
        """Begin the copy of float32 logits [L, vocab_size] to host memory, which is returned."""
        self._turn = 1 - self._turn
        if logits.numel() > self._logits[self._turn].numel():
            self._logits[self._turn] = torch.empty(2 * logits.numel(), pin_memory=self._pinned)
        host = self._logits[self._turn][: logits.numel()].view(logits.shape)
        host.copy_(logits, non_blocking=True)
        return host
