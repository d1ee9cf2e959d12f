"""The CPU model runner: checks a step, computes it on a thread of its own, hands back the logits.

The thread lets the caller schedule the next step meanwhile; the compiled pass leaves the interpreter for the whole
step. Results are exact: a token's logits do not depend on what else is in the batch or how a prompt was cut.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import torch

from services.worker.model.config import ModelConfig
from services.worker.model.decoder import Decoder
from services.worker.model.layout import ComputeDtype, KvLayout
from services.worker.model.memory import MemoryMap
from services.worker.model.step import StepInput
from services.worker.model.step_check import StepLimits, checked_batch


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """What the rest of a worker must know of the loaded model.

    digest: 16 bytes, identifies interchangeable KV. max_context: served context length in tokens. weight_format:
    "safetensors", or "gguf:" and its quantisations. backend: which arithmetic runs; replicas with the same backend
    agree to the last bit. memory: where the device's memory goes.
    """

    config: ModelConfig
    layout: KvLayout
    digest: bytes
    dtype: ComputeDtype
    vocab_size: int
    max_context: int
    num_blocks: int
    weight_format: str
    backend: str
    memory: MemoryMap


class CpuRunner:
    """A Runner (step.py) on CPU. Close it, or use it as a context manager, to end its thread."""

    def __init__(self, spec: RunnerSpec, decoder: Decoder, num_threads: int | None = None) -> None:
        """num_threads: of one step; None follows torch.get_num_threads() at each submit."""
        self.spec = spec
        self.decoder = decoder
        self._num_threads = num_threads
        slots = decoder.adapters.num_slots
        self._limits = StepLimits(spec.vocab_size, spec.num_blocks, spec.max_context, slots)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model-runner")
        self._in_flight: Future[torch.Tensor] | None = None

    def submit(self, step: StepInput) -> None:
        """Start a step; its arrays are copied. Raises ValueError when they disagree; the pool is then untouched."""
        if self._in_flight is not None:
            raise RuntimeError("a step is already in flight")
        batch = checked_batch(step, self._limits)
        num_threads = self._num_threads or torch.get_num_threads()
        self._in_flight = self._thread.submit(self.decoder.forward, batch, num_threads)

    def collect(self) -> torch.Tensor:
        """Wait for the submitted step; float32 logits [L, vocab_size], a fresh tensor."""
        if self._in_flight is None:
            raise RuntimeError("no step is in flight")
        step, self._in_flight = self._in_flight, None
        return step.result()

    def hidden(self) -> torch.Tensor:
        """Of the step that was collected last: float32 [L, hidden size], valid until the next submit."""
        return self.decoder.hidden()

    def close(self) -> None:
        """Wait for the step in flight, if any, and end the thread."""
        self._thread.shutdown()

    def __enter__(self) -> CpuRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
