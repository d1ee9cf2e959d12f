"""Memory figures of a device, and host memory that it may copy from and to without being waited for.

Here and in timeline.py is all that asks the CUDA runtime; on a CPU, on which tests run, nothing is known or pinned.
"""

from __future__ import annotations

import torch


class DeviceMemory:
    """Memory figures of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def name(self) -> str:
        """For people."""
        if self._device.type != "cuda":
            return self._device.type
        return f"{self._device} {torch.cuda.get_device_name(self._device)}"

    def free_and_total(self) -> tuple[int, int]:
        """Bytes free to everybody now, what this process only caches given back before; and all bytes."""
        if self._device.type != "cuda":
            return 0, 0
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return free, total

    def allocated(self) -> int:
        """Bytes that tensors of this process take."""
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0

    def settle(self) -> None:
        """Wait until everything launched so far is done, on whatever stream."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def begin_peak(self) -> None:
        """From now on the peak counts."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """Most bytes that tensors took since `begin_peak`."""
        self.settle()
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0


def pin_memory(staging: torch.Tensor, device: torch.device) -> None:
    """Make shared memory a target of copies that nobody waits for. Raises RuntimeError when the driver refuses."""
    if device.type == "cuda":
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = int(runtime.cudaHostRegister(staging.data_ptr(), staging.nbytes, 0))
        if status:
            raise RuntimeError(f"staging_bytes={staging.nbytes}: this much memory cannot be pinned (status {status})")
