"""Where the local model cache is: one schema for workers, which are told, and the command line, which looks."""

from __future__ import annotations

import os
from pathlib import Path

from services.common.settings import ConfigurationError, configuration_tables

DEFAULT_CACHE_BYTES = 64 * 2**30
_DIR, _BYTES = "model_cache_dir", "model_cache_bytes"


def configured_cache() -> tuple[Path | None, int]:
    """Directory (None: there is none) and bound as a worker's environment and file say. Raises ConfigurationError."""
    folder, size = _configured(_DIR), _configured(_BYTES)
    try:
        return (Path(folder).expanduser() if folder else None), int(size or DEFAULT_CACHE_BYTES)
    except ValueError:
        raise ConfigurationError(f"worker: {_BYTES}={size!r}: no number of bytes") from None


def _configured(name: str) -> str:
    tables = configuration_tables()
    of_file = tables.get("worker", {}).get(name, tables.get("common", {}).get(name, ""))
    return os.environ.get(f"KVMESH_WORKER_{name.upper()}") or os.environ.get(f"KVMESH_{name.upper()}") or str(of_file)
