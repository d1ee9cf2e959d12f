"""A rank host as a real process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.log_lines import log_events
from tests.support.mesh import scrape, total
from tests.support.processes import clean_environment
from tests.worker.replica import SECRET, START_TIMEOUT_S

# Another host's, as far as one machine has one.
OTHER_HOST = "127.0.0.2"


@dataclass
class RankHostProcess:
    """A running rank host."""

    process: subprocess.Popen[bytes]
    told: dict[str, Any]
    log_file: Path

    @property
    def address(self) -> str:
        """For `--rank-hosts`."""
        return str(self.told["address"])

    def log(self) -> str:
        """Everything it and its ranks wrote."""
        return self.log_file.read_text()

    def num_ranks(self) -> float:
        """Ranks that run there."""
        return total(scrape(self.told["metrics"]), "kvmesh_rank_host_ranks")

    def ends(self) -> dict[str, int]:
        """Ranks that have ended, by reason."""
        reasons = [event["reason"] for event in log_events(self.log(), '"rank ended"')]
        return {reason: reasons.count(reason) for reason in reasons}


@contextlib.asynccontextmanager
async def running_rank_host(
    folder: Path,
    *flags: str,
    secret: str = SECRET,
    host: str = OTHER_HOST,
    within: Sequence[str] = (),
) -> AsyncIterator[RankHostProcess]:
    """A ready rank host with the default model; killed at the end if it still runs. within: a command that runs it."""
    folder.mkdir(parents=True, exist_ok=True)
    ready_file, log = folder / "rank_host.json", folder / "rank_host.log"
    ready_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "services.worker.rank_host", "--ready-file", str(ready_file), "--threads", "1"]
    with log.open("ab") as stderr:
        process = subprocess.Popen(
            [*within, *command, "--listen", f"{host}:0", *flags],
            env=clean_environment(KVMESH_MESH_SECRET=secret),
            stderr=stderr,
        )
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not ready_file.exists():
                assert process.poll() is None, log.read_text()
                await asyncio.sleep(0.05)
        yield RankHostProcess(process, json.loads(ready_file.read_text()), log)
    finally:
        process.kill()
        process.wait(30)
