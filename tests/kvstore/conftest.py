"""A real kvstore process on a real Valkey."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from services.common.transfer.protocol import PeerAddress
from tests.common.transfer.blocks import SECRET
from tests.support.log_lines import log_events
from tests.support.mesh import wait_for
from tests.support.processes import clean_environment
from tests.support.valkey import Valkey

_ROOT = Path(__file__).parents[2]
_START_DEADLINE_S = 30.0


class KvStoreProcess:
    """One node. within: a command that runs it, say in another network."""

    def __init__(
        self,
        folder: Path,
        redis_url: str,
        transport: str,
        *options: str,
        name: str = "kv-1",
        secret: str = SECRET,
        within: Sequence[str] = (),
    ) -> None:
        ready = folder / f"{name}.ready.json"
        ready.unlink(missing_ok=True)
        self._log = folder / f"{name}.log"
        flags = ["--instance", name, "--redis-url", redis_url, "--transport", transport, "--ready-file", str(ready)]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*within, sys.executable, "-m", "services.kvstore", *flags, *options],
                cwd=_ROOT,
                env=clean_environment(KVMESH_MESH_SECRET=secret),
                stderr=log,
            )
        try:
            self.ready = self._wait(ready)
        except BaseException:
            self.end()
            raise
        self.peer = PeerAddress(self.ready["pull_address"], self.ready["address"])

    def log(self) -> list[dict[str, Any]]:
        """Its log lines."""
        return log_events(self._log.read_text())

    def terminate(self, timeout_s: float = 20.0) -> int:
        """SIGTERM; returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def end(self) -> None:
        """End it, whatever its state."""
        self.process.kill()
        self.process.wait(30)

    def _wait(self, ready: Path) -> dict[str, Any]:
        wait_for(
            lambda: ready.exists() or self.process.poll() is not None, within_s=_START_DEADLINE_S, what="a kvstore"
        )
        if not ready.exists():
            raise RuntimeError(self._log.read_text())
        found: dict[str, Any] = json.loads(ready.read_text())
        return found


StartKvStore = Callable[..., KvStoreProcess]


@pytest.fixture
def start_kvstore(tmp_path: Path, valkey: Valkey) -> Iterator[StartKvStore]:
    """Starts nodes that end with the test."""
    started: list[KvStoreProcess] = []

    def start(transport: str, *options: str, name: str = "kv-1") -> KvStoreProcess:
        started.append(KvStoreProcess(tmp_path, valkey.url, transport, *options, name=name))
        return started[-1]

    yield start
    for node in started:
        node.end()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1.8 MiB: the key file and one or two small segments."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1800k", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
