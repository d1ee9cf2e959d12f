"""Settings that only the engine can refuse, because it knows model and device: the worker ends with one clear line."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.support.processes import clean_environment
from tests.support.valkey import Valkey
from tests.worker.replica import SECRET


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--staging-bytes", "10"), "staging_bytes=10: a block takes"),
        pytest.param(
            ("--device", "cuda"),
            "device='cuda':",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_one_line_and_no_traceback(valkey: Valkey, flags: tuple[str, ...], message: str) -> None:
    command = [sys.executable, "-m", "services.worker", "--redis-url", valkey.url, "--num-blocks", "8", *flags]
    ended = subprocess.run(
        command,
        env=clean_environment(KVMESH_MESH_SECRET=SECRET),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert ended.returncode != 0
    assert message in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
