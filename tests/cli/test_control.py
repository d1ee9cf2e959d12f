"""`kvmesh ctl` against the control API of a real router: what it prints, and errors in one line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from services.cli.errors import CliError
from services.cli.main import app
from services.common.bearer_keys import hash_key
from services.common.redis_client import connect_redis
from tests.router.fake_worker import DIGEST, FakeWorker
from tests.router.test_router import SECRET, RouterProcess, router
from tests.support.valkey import Valkey

KEY = "an admin's key"


class Shell:
    """Runs `kvmesh ctl` on one router."""

    def __init__(self, folder: Path, process: RouterProcess) -> None:
        (folder / "secret").write_text("a secret of the mesh\n")
        (folder / "key").write_text(KEY + "\n")
        self.process = process
        options = ("--router", process.ready["address"], "--secret-file", folder / "secret")
        self._options = (*map(str, options), "--admin-key-file", str(folder / "key"))

    async def run(self, *words: str) -> str:
        """What a command prints. Raises CliError."""

        def ctl() -> str:
            result = CliRunner().invoke(app, ["ctl", words[0], *self._options, *words[1:]])
            if result.exception is not None:
                raise result.exception
            return result.stdout

        return await asyncio.to_thread(ctl)

    async def json(self, *words: str) -> Any:
        return json.loads(await self.run(*words, "--json"))

    async def error(self, *words: str) -> str:
        with pytest.raises(CliError) as caught:
            await self.run(*words)
        line = str(caught.value)
        assert "\n" not in line
        return line


@pytest.fixture
async def shell(tmp_path: Path, valkey: Valkey) -> AsyncIterator[Shell]:
    client = connect_redis(valkey.url)
    worker = FakeWorker(client, SECRET, "w1")
    await worker.start()
    (tmp_path / "keys").write_text(f"{hash_key(KEY)} tester\n")
    async with router(tmp_path, valkey.url, "--admin-keys-file", str(tmp_path / "keys")) as process:
        await process.workers_ready(1)
        yield Shell(tmp_path, process)
    await worker.stop()
    await client.aclose()


async def test_versions_and_traffic(shell: Shell) -> None:
    (unregistered,) = await shell.json("models")
    assert unregistered == {
        "model": "m", "digest": DIGEST.hex(), "replicas": 1, "ready_replicas": 1,
        "weight_format": "gguf:Q4_1", "dtype": "bfloat16",
    }  # fmt: skip
    await shell.json("register", "m", DIGEST.hex()[:8], "--version", "v1")
    await shell.json("register", "m", "e" * 32, "--version", "v2")
    shown = await shell.run("traffic", "m", "v1=90", "v2=10")
    assert "`kvmesh ctl rollback m` gives all traffic to v1" in shown
    weights = {version["version"]: version["weight"] for version in await shell.json("traffic", "m")}
    assert weights == {"v1": 90, "v2": 10}
    assert [version["weight"] for version in await shell.json("rollback", "m")] == [100, 0]
    assert await shell.error("rollback", "m") == (
        "there is no rollout to roll back: no version had all the traffic before"
    )
    assert await shell.error("traffic", "m", "v1") == "'v1': not VERSION=WEIGHT with a whole number"
    assert "version 'v9' is not registered" in await shell.error("traffic", "m", "v9=1")


async def test_drain_list_and_explain(shell: Shell) -> None:
    grant = (await shell.process.route().ask([])).grant
    drained = await shell.run("drain", "w1")
    assert drained == "w1: drained; 0 running, 0 waiting\n"
    (worker,) = (await shell.json("list"))["workers"]
    assert (worker["worker_id"], worker["drained"]) == ("w1", True)
    assert "drained" in await shell.run("list")
    assert (await shell.json("undrain", "w1"))[0]["drained"] is False
    assert await shell.error("drain", "w9") == "no worker is called 'w9'"
    told = await shell.run("explain", grant.request_id)
    assert "w1 of 1 by predicted_ttft" in told
    assert "outcome: still open" in told
    (record,) = await shell.json("explain", grant.request_id)
    assert (record["worker_id"], record["candidates"][0]["worker_id"]) == ("w1", "w1")
    assert await shell.error("explain", "nothing") == "no router has decided on 'nothing' lately"
    assert await shell.error("drain", "w1", "--admin-key-file", "/nowhere") == (
        "admin key /nowhere: No such file or directory"
    )


async def test_aliases_the_default_model_and_pools(shell: Shell) -> None:
    assert await shell.json("alias") == []
    assert await shell.json("alias", "best", "m") == [{"alias": "best", "model": "m"}]
    assert await shell.json("default-model", "m") == [{"default_model": "m"}]
    assert await shell.json("alias") == [{"alias": "best", "model": "m"}]
    assert "a model is called 'm'" in await shell.error("alias", "m", "other")
    assert "takes a name and a model" in await shell.error("alias", "best")
    assert await shell.json("default-model", "--clear") == []
    assert await shell.json("alias", "best", "--remove") == []
    (pool,) = await shell.json("pools")
    assert (pool["model"], pool["replicas"], pool["desired_replicas"], pool["waiting_requests"]) == ("m", 1, 1, 0)
