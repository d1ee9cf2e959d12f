"""What every engine process does as it starts, whatever its rank."""

from __future__ import annotations

import os

import structlog
import torch

from services.common.settings import ConfigurationError
from services.worker.engine.gpu import DeviceUnavailable
from services.worker.engine_messages import EngineFailed
from services.worker.model.errors import ModelError

_log = structlog.get_logger()


def prepare_torch(threads: int) -> int:
    """Set torch up for inference; the number of compute threads, 0 having been one for each core."""
    number = threads or os.cpu_count() or 1
    torch.set_num_threads(number)
    torch.set_grad_enabled(False)
    return number


def cannot_start(error: Exception) -> EngineFailed:
    """Log why, and what the front is to be told."""
    kind = type(error).__name__
    # What is wrong with a model, a device or a size is said in its one line.
    told = _log.error if isinstance(error, ModelError | DeviceUnavailable | ConfigurationError) else _log.exception
    told("the engine cannot start", reason=str(error), kind=kind)
    return EngineFailed(f"{kind}: {error}".splitlines()[0], kind)
