"""A mesh whose workers only take the time of computing: everything else is real, and it is up in seconds."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.mesh import Mesh, running_mesh

# Fast enough that a test waits for nothing, slow enough that a long answer can be interrupted.
SIM_ENVIRONMENT = {
    "KVMESH_WORKER_SIM_PREFILL_TOKENS_PER_S": "20000",
    "KVMESH_WORKER_SIM_DECODE_STEP_S": "0.01",
    "KVMESH_WORKER_NUM_BLOCKS": "2000",
}


@contextmanager
def running_sim_mesh(*options: str, state: Path | None = None, env: dict[str, str] | None = None) -> Iterator[Mesh]:
    """Three simulated workers, or what `options` of `kvmesh up` say; env: goes before SIM_ENVIRONMENT."""
    with tempfile.TemporaryDirectory(prefix="kvm-") as folder:
        sizes = () if "--workers" in options else ("--workers", "3")
        flags = ("--engine", "sim", "--kvstores", "0", *sizes, *options)
        with running_mesh(state or Path(folder), *flags, env=SIM_ENVIRONMENT | (env or {})) as mesh:
            yield mesh
