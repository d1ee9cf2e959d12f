"""From a worker's settings to the model of time that its simulated engine obeys."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import msgspec

from services.common.settings import ConfigurationError
from services.common.time_model import TimeModel
from services.worker.config import WorkerSettings


def time_model(settings: WorkerSettings) -> TimeModel:
    """In real seconds, the speed-up applied. Raises ConfigurationError for a calibration that cannot be used."""
    if settings.sim_calibration is not None:
        told = _read(settings.sim_calibration)
    else:
        told = TimeModel(
            settings.sim_prefill_tokens_per_s,
            settings.sim_decode_step_s,
            settings.sim_decode_sequence_s,
            settings.sim_decode_context_s,
        )
    speed = settings.sim_speed
    return TimeModel(
        told.prefill_tokens_per_s * speed,
        told.decode_step_s / speed,
        told.decode_sequence_s / speed,
        told.context_s / speed,
    )


def _read(path: Path) -> TimeModel:
    try:
        model = msgspec.json.decode(path.read_bytes(), type=TimeModel)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"worker: sim_calibration={str(path)!r}: {error}") from None
    for name, value in asdict(model).items():
        if not (math.isfinite(value) and value >= 0) or (value == 0 and name == "prefill_tokens_per_s"):
            raise ConfigurationError(f"worker: sim_calibration={str(path)!r}: {name} = {value}")
    return model
