"""`kvmesh ctl` on a mesh of the tests, in this process."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from typer.testing import CliRunner

from services.cli.main import app
from tests.support.mesh import Mesh


async def ctl(mesh: Mesh, *words: str) -> Any:
    """What a command says as JSON. Raises CliError."""

    def run() -> Any:
        result = CliRunner().invoke(app, ["ctl", *words, "--json", "--state", str(mesh.state)])
        if result.exception is not None:
            raise result.exception
        return json.loads(result.stdout)

    return await asyncio.to_thread(run)
