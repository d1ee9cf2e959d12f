"""Fixtures that tests of several services use."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.valkey import Valkey


@pytest.fixture
def valkey() -> Iterator[Valkey]:
    """A fresh Valkey server. The folder is short: socket paths are limited to about 100 characters."""
    folder = Path(tempfile.mkdtemp(prefix="kvm-"))
    server = Valkey(folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
