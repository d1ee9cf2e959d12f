"""The runner of a model on a device: arrays in by one copy, a captured or an eager step, logits out by another.

`submit` only launches; `collect` waits for the logits. Decode-only steps run as captured graphs, padded to a captured
shape; steps with prefill run as they are. Lanes (timeline.py): the step waits for blocks that came into the pool before
it, its logits are copied on a lane of their own while blocks move on others.

**Exact mode.** The project's kernels have fixed tiles and sums from position 0, products are the Triton kernel's with
one tile for every number of rows: a token's logits do not depend on what else is in the batch, on padding or on how its
prompt was cut. Without it products are the vendor library's and attention is split to fill the device, both by the
number of rows: the same token may round differently in another batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from services.worker.model.device.graphs import Capture, DecodeGraphs
from services.worker.model.device.step_buffers import StepBuffers
from services.worker.model.device.timeline import Mark, Timeline
from services.worker.model.device.triton_decoder import TritonDecoder
from services.worker.model.runner import RunnerSpec
from services.worker.model.step import StepInput
from services.worker.model.step_check import StepLimits, checked_batch


class PoolWriter(Protocol):
    """Who writes to the pool beside steps."""

    def before_step(self) -> None:
        """Let the next step come after what was begun so far."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """device_logits: kept until their copy has been waited for."""

    device_logits: torch.Tensor
    logits: torch.Tensor
    copied: Mark


class DeviceRunner:
    """A Runner on the device of its decoder's pool."""

    def __init__(
        self, spec: RunnerSpec, decoder: TritonDecoder, timeline: Timeline, writer: PoolWriter, graphs: DecodeGraphs
    ) -> None:
        self.spec = spec
        self._decoder = decoder
        self._timeline = timeline
        self._writer = writer
        self._graphs = graphs
        self._buffers = StepBuffers(decoder.pool.device)
        self._limits = StepLimits(spec.vocab_size, spec.num_blocks, spec.max_context)
        self._in_flight: _InFlight | None = None

    def capture(self, capture: Capture) -> None:
        """Capture the decode steps; before the first step, on a pool that nobody uses."""
        self._graphs.capture(self._decoder.run, capture, self._decoder.pool.device)

    def submit(self, step: StepInput) -> None:
        """Launch a step; its arrays are copied. Raises ValueError when they disagree; the pool is then untouched."""
        if self._in_flight is not None:
            raise RuntimeError("a step is already in flight")
        batch = checked_batch(step, self._limits)
        self._writer.before_step()
        with self._timeline.on("steps"), torch.inference_mode():
            logits = self._graphs.run(batch, self._buffers)
            if logits is None:
                logits = self._decoder.run(self._buffers.upload(batch))
        self._timeline.after("results", self._timeline.mark("steps"))
        with self._timeline.on("results"), torch.inference_mode():
            host = self._buffers.download(logits)
        self._in_flight = _InFlight(logits, host, self._timeline.mark("results"))

    def collect(self) -> torch.Tensor:
        """Wait for the submitted step; float32 logits [L, vocab_size] in host memory.

        They live until the step after the next is submitted.
        """
        if self._in_flight is None:
            raise RuntimeError("no step is in flight")
        step, self._in_flight = self._in_flight, None
        step.copied.wait()
        return step.logits

    def hidden(self) -> torch.Tensor:
        """Raises RuntimeError: settings that would ask for it are refused on a device."""
        raise RuntimeError("hidden states stay on the device")
