"""One Envoy and one gateway for each test; both start in a fraction of a second."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.envoy.edge import Edge, Gateway, running_envoy, serving_gateway


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with serving_gateway() as serving:
        yield serving


@pytest.fixture
async def edge(gateway: Gateway, tmp_path: Path) -> AsyncIterator[Edge]:
    async with running_envoy(tmp_path, gateway.address) as running:
        yield running
