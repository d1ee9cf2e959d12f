"""Fixtures that tests of several services use."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.support.mesh import Mesh
from tests.support.netns import Island, impossible, island
from tests.support.sim_mesh import running_sim_mesh
from tests.support.valkey import Valkey

# Triton decides when it is imported whether kernels are interpreted on CPU tensors or compiled: in tests interpreted,
# unless somebody with a GPU says TRITON_INTERPRET=0. A test that compiles starts a process of its own.
os.environ.setdefault("TRITON_INTERPRET", "1")

# How long an example takes says more of what else the machine does than of what is tested.
settings.register_profile("kvmesh", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvmesh")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """What a test's commands make of the process's logging ends with the test."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(scope="session")
def link() -> Iterator[Island]:
    """For tests that use UCX in this process."""
    with island() as made:
        yield made


@pytest.fixture(scope="session", autouse=True)
def link_before_ucx(request: pytest.FixtureRequest) -> None:
    """UCX looks at a process's routes once: a link that is there afterwards cannot be reached over it."""
    if any("link" in getattr(item, "fixturenames", ()) for item in request.session.items) and not impossible():
        request.getfixturevalue("link")


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


@pytest.fixture
def sim_mesh() -> Iterator[Mesh]:
    """Three simulated workers, one router, one gateway, Envoy and Valkey, of this test's own."""
    with running_sim_mesh() as mesh:
        yield mesh
