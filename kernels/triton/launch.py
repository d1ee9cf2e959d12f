"""What launchers ask about the device they launch on."""

from __future__ import annotations

from functools import lru_cache

import torch

# Of tensors on a CPU, whose kernels are interpreted: as a device with few processors, of the newer architecture.
INTERPRETED_PROCESSORS = 4
INTERPRETED_ARCHITECTURE = 90


@lru_cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache
def architecture(device: torch.device) -> int:
    """The shipped architecture whose launch configurations serve the device: 80 or 90."""
    if device.type != "cuda":
        return INTERPRETED_ARCHITECTURE
    major, _ = torch.cuda.get_device_capability(device)
    return 90 if major >= 9 else 80


@lru_cache
def has_fp8(device: torch.device) -> bool:
    """Whether kernels for the device may use the type e4m3."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
