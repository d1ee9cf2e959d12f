"""Whether there is a GPU to run on, and what is missing where there is none."""

from __future__ import annotations

import importlib.util

import torch


class DeviceUnavailable(Exception):
    """device=cuda cannot be had; the message says what is missing."""


def cuda_device() -> torch.device:
    """The GPU. Raises DeviceUnavailable."""
    if torch.version.cuda is None:
        raise DeviceUnavailable(f"device='cuda': torch {torch.__version__} is built without CUDA")
    if not torch.cuda.is_available():
        raise DeviceUnavailable("device='cuda': no GPU or no driver is visible to this process")
    if importlib.util.find_spec("triton") is None:
        raise DeviceUnavailable("device='cuda': the package triton is not installed")
    return torch.device("cuda", torch.cuda.current_device())
