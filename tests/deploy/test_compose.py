"""The compose file names what exists, and its small programs work."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deploy.compose import healthcheck
from deploy.compose.environment import write_environment
from services.common.rpc import MeshServer

FOLDER = Path(healthcheck.__file__).parent
ROOT = FOLDER.parent.parent
OURS = ("kvstore", "router", "worker", "gateway")


@pytest.fixture(scope="module")
def compose() -> dict[str, dict[str, object]]:
    return yaml.safe_load((FOLDER / "docker-compose.yml").read_text())["services"]  # type: ignore[no-any-return]


def test_every_service_has_its_container(compose: dict[str, dict[str, object]]) -> None:
    assert set(compose) == {*OURS, "redis", "envoy", "envoy-config", "prometheus", "jaeger"}
    assert all(compose[name]["command"][0] == name for name in OURS)  # type: ignore[index]


def test_our_containers_may_do_little(compose: dict[str, dict[str, object]]) -> None:
    for name in OURS:
        assert compose[name]["cap_drop"] == ["ALL"]
        assert compose[name]["security_opt"] == ["no-new-privileges:true"]
    assert (FOLDER / "Dockerfile").read_text().count("USER kvmesh") == 2


def test_prometheus_asks_every_service(compose: dict[str, dict[str, object]]) -> None:
    (job,) = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    assert set(job["dns_sd_configs"][0]["names"]) == {*OURS, "envoy"}


def test_no_secret_is_in_the_compose_file() -> None:
    text = (FOLDER / "docker-compose.yml").read_text()
    assert re.findall(r"(?:SECRET|PASSWORD)[^:]*: (?!\$\{|redis://:\$\{)\S+", text) == []


def test_fresh_secrets_are_private_and_kept(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    assert write_environment(path)
    before = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert not write_environment(path)
    assert path.read_text() == before


async def test_container_health_is_the_services_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    server = MeshServer("127.0.0.1:0", secret=None)
    monkeypatch.setattr(healthcheck, "ADDRESS", await server.start())
    assert await asyncio.to_thread(healthcheck.main) == 1
    await server.set_ready(True)
    assert await asyncio.to_thread(healthcheck.main) == 0
    await server.stop(0)
    assert await asyncio.to_thread(healthcheck.main) == 1


def test_the_lock_covers_every_dependency() -> None:
    """Each direct dependency of pyproject.toml is pinned."""
    code = (
        "import re, tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project'];"
        "n = lambda s: re.sub(r'[-_.]+', '-', re.match(r'[A-Za-z0-9._-]+', s)[0]).lower();"
        "locked = {n(l) for l in open('requirements.lock') if '==' in l and l[0] != '#'};"
        "wanted = p['dependencies'] + sum(p['optional-dependencies'].values(), []);"
        "print(*sorted({n(w) for w in wanted} - locked))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    )
    assert result.stdout.strip() == ""
