"""One mesh for all end-to-end tests: two workers, two routers, a kvstore node, real Envoy and Valkey."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.support.mesh import Mesh, running_mesh


@pytest.fixture(scope="session")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    options = ("--workers", "2", "--routers", "2", "--kvstores", "1")
    env = {"KVMESH_WORKER_POOLING": "mean", "KVMESH_WORKER_SPECULATION": "ngram"}
    with running_mesh(tmp_path_factory.mktemp("mesh"), *options, env=env) as running:
        yield running


@pytest.fixture
def client(mesh: Mesh) -> Iterator[openai.OpenAI]:
    """The official client, unmodified; its own retries are off so that each test sees the first answer."""
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made
