"""Writes fresh secrets for the compose file: `python -m deploy.compose.environment`; an existing file is kept."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

DEFAULT_FILE = Path(__file__).with_name(".env")


def write_environment(path: Path) -> bool:
    """Create `path` (0600) with a mesh secret and a Redis password; False when it is there already."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w") as file:
        file.write(f"KVMESH_MESH_SECRET={secrets.token_urlsafe(32)}\nREDIS_PASSWORD={secrets.token_urlsafe(24)}\n")
    return True


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FILE
    print(f"{target}: {'written' if write_environment(target) else 'kept'}")
