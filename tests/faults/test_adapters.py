"""Adapters on a mesh of real processes: mixed with the base, added and removed while it runs, after restarts."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from bench.random_adapters import write_random_adapter
from bench.tiny_model import write_tiny_model
from services.worker.model.config import ModelConfig
from services.worker.model.load import open_model
from tests.support.mesh import Mesh, running_mesh, total, wait_for

NAMES = ("tiny", "tiny:one", "tiny:two")
PROMPT = "Once upon a time there was a"
WITHIN_S = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Mesh]:
    options = ("--model", f"tiny={model}", "--workers", "2", "--routers", "2", "--kvstores", "0")
    with running_mesh(tmp_path_factory.mktemp("mesh"), *options) as running:
        yield running


@pytest.fixture
def client(mesh: Mesh) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=5, timeout=120) as made:
        yield made


def adapter(folder: Path, model: Path, seed: int) -> Path:
    config: ModelConfig = open_model(model).config
    return write_random_adapter(folder, config, seed=seed, rank=4, strength=1.0)


def ask(client: openai.OpenAI, name: str) -> str:
    answer = client.completions.create(model=name, prompt=PROMPT, max_tokens=24, temperature=0)
    assert answer.model == name
    return answer.choices[0].text


def names(client: openai.OpenAI) -> set[str]:
    return {model.id for model in client.models.list()}


def test_adapters_from_their_registration_to_their_end(
    mesh: Mesh, client: openai.OpenAI, model: Path, tmp_path: Path
) -> None:
    for seed, name in enumerate(("one", "two")):
        mesh.kvmesh("ctl", "adapter", "add", name, str(adapter(tmp_path / name, model, seed)), "--model", "tiny")
    wait_for(lambda: names(client) == set(NAMES), within_s=WITHIN_S, what="the adapters are listed")
    described = client.models.retrieve("tiny:one").model_dump()
    assert (described["parent"], described["kvmesh"]["adapter_rank"]) == ("tiny", 4)
    assert len(described["kvmesh"]["adapter_digest"]) == 32
    with pytest.raises(openai.NotFoundError):
        ask(client, "tiny:three")

    alone = {name: ask(client, name) for name in NAMES}
    assert len(set(alone.values())) == 3
    with ThreadPoolExecutor(12) as threads:
        mixed = list(threads.map(lambda number: (NAMES[number % 3], ask(client, NAMES[number % 3])), range(24)))
    assert all(text == alone[name] for name, text in mixed)

    for process in ("router-0", "router-1", "worker-0", "worker-1"):
        mesh.replace(process)
    assert {name: ask(client, name) for name in NAMES} == alone
    assert sum(total(mesh.metrics(f"worker-{n}"), "kvmesh_worker_adapter_loads_total") for n in (0, 1)) >= 1

    # The name stays and the content changes: nothing of the old one's cache may be found.
    mesh.kvmesh("ctl", "adapter", "add", "one", str(adapter(tmp_path / "other", model, 9)), "--model", "tiny")
    wait_for(lambda: ask(client, "tiny:one") != alone["tiny:one"], within_s=WITHIN_S, what="the new content is served")
    assert len({ask(client, "tiny:one") for _ in range(2)}) == 1
    mesh.kvmesh("ctl", "adapter", "remove", "two", "--model", "tiny")
    wait_for(lambda: "tiny:two" not in names(client), within_s=WITHIN_S, what="the adapter is gone")
    with pytest.raises(openai.NotFoundError):
        ask(client, "tiny:two")
    assert ask(client, "tiny") == alone["tiny"]
