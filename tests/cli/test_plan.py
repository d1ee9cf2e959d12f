"""The plan of a mesh, the options behind it, and what must not be in command lines."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from services.cli.errors import CliError
from services.cli.options import MeshOptions, configured_redis_url, mesh_options
from services.cli.plan import Binaries, MeshPlan, Planner
from services.cli.state import StateDir
from services.common.models import ModelSource
from services.common.settings import ConfigurationError

MODELS = (ModelSource("a", Path("/a.gguf")), ModelSource("b", Path("/b.gguf")))
PASSWORD = "never-in-a-command-line"


def made(**values: object) -> MeshPlan:
    return Planner(
        mesh_options(**{"workers": 2, **values}),
        MODELS,
        state=StateDir(Path("/state")),
        binaries=Binaries(Path("/envoy"), Path("/valkey")),
        ports=itertools.count(20_000),
        redis_password=PASSWORD,
        otlp_endpoint="http://127.0.0.1:4317",
    ).plan()


def test_every_process_has_a_name_and_addresses_of_its_own() -> None:
    plan = made(workers=3, kvstores=2, routers=2, gateways=2)
    names = [spec.name for spec in plan.processes]
    assert names == [
        *("valkey", "kvstore-0", "kvstore-1", "router-0", "router-1"),
        *("worker-0", "worker-1", "worker-2", "gateway-0", "gateway-1", "envoy"),
    ]
    addresses = [value for spec in plan.processes for value in (spec.address, spec.metrics, spec.admin) if value]
    assert len(addresses) == len(set(addresses))


def test_models_are_shared_out_over_the_workers() -> None:
    workers = [spec for spec in made(workers=3).processes if spec.kind == "worker"]
    models = [spec.command[spec.command.index("--model") + 1] for spec in workers]
    assert models == ["a=/a.gguf", "b=/b.gguf", "a=/a.gguf"]


def test_pools_are_workers_with_roles() -> None:
    workers = [
        spec for spec in made(workers=None, prefill_workers=1, decode_workers=2).processes if spec.kind == "worker"
    ]
    roles = [spec.command[spec.command.index("--role") + 1] for spec in workers]
    assert roles == ["prefill", "decode", "decode"]
    assert not any("--role" in spec.command for spec in made(workers=2).processes)


def test_gateways_know_every_router_and_begin_with_different_ones() -> None:
    plan = made(routers=2, gateways=3)
    a, b = [spec.address for spec in plan.processes if spec.kind == "router"]
    gateways = [spec for spec in plan.processes if spec.kind == "gateway"]
    told = [gateway.command[gateway.command.index("--routers") + 1] for gateway in gateways]
    assert told == [f"{a},{b}", f"{b},{a}", f"{a},{b}"]


def test_no_secret_is_in_a_command_line() -> None:
    for plan in (made(), made(redis_url=f"redis://:{PASSWORD}@redis:6379/0")):
        assert PASSWORD in plan.redis_url
        assert not any(PASSWORD in part for spec in plan.processes for part in spec.command)


def test_a_given_redis_is_used() -> None:
    plan = made(redis_url="redis://elsewhere:6379/0")
    assert "valkey" not in {spec.kind for spec in plan.processes}
    assert plan.processes[0].environment == {"KVMESH_REDIS_URL": "redis://elsewhere:6379/0"}


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert [MeshOptions(workers=count).fair_threads for count in (1, 3, 16)] == [8, 2, 1]


def test_only_what_is_said_becomes_a_flag() -> None:
    silent, told = (
        next(spec for spec in plan.processes if spec.kind == "worker")
        for plan in (made(workers=2), made(workers=2, threads=5, dtype="float32", kv_cache_mb=2))
    )
    assert not {"--threads", "--dtype", "--device", "--kv-cache-bytes"} & set(silent.command)
    assert set(silent.defaults) == {"KVMESH_WORKER_THREADS"}
    assert told.command[-6:] == ("--dtype", "float32", "--threads", "5", "--kv-cache-bytes", str(2 * 2**20))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"workers": 0}, "--workers=0"),
        ({"workers": None, "prefill_workers": 2}, "--workers=0"),
        ({"device": "tpu"}, "--device='tpu'"),
        ({"http_port": 70_000}, "--http-port=70000"),
        ({"models": ("a", "b")}, "--workers=1: fewer than the 2 models"),
    ],
)
def test_a_wrong_option_is_named(values: dict[str, object], named: str) -> None:
    with pytest.raises(CliError) as caught:
        mesh_options(**values)
    assert str(caught.value).startswith(named)
    assert "\n" not in str(caught.value)


def test_redis_of_the_environment_and_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REDIS_URL", "KVMESH_REDIS_URL", "KVMESH_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    assert configured_redis_url() == ""
    monkeypatch.setenv("REDIS_URL", "redis://plain/0")
    assert configured_redis_url() == "redis://plain/0"
    file = tmp_path / "kvmesh.toml"
    file.write_text('[common]\nredis_url = "redis://file/0"\n')
    monkeypatch.setenv("KVMESH_CONFIG", str(file))
    assert configured_redis_url() == "redis://file/0"
    monkeypatch.setenv("KVMESH_REDIS_URL", "redis://ours/0")
    assert configured_redis_url() == "redis://ours/0"
    file.write_text("not toml")
    monkeypatch.delenv("REDIS_URL")
    monkeypatch.delenv("KVMESH_REDIS_URL")
    with pytest.raises(ConfigurationError, match="configuration file"):
        configured_redis_url()


def test_each_kvstore_has_an_ssd_directory_of_its_own() -> None:
    assert not any("--ssd-bytes" in spec.command for spec in made().processes)
    nodes = [spec for spec in made(kvstores=2, kvstore_ssd_mb=64).processes if spec.kind == "kvstore"]
    paths = [node.command[node.command.index("--ssd-path") + 1] for node in nodes]
    assert paths == ["/state/ssd/kvstore-0", "/state/ssd/kvstore-1"]
    assert all(node.command[node.command.index("--ssd-bytes") + 1] == str(64 * 2**20) for node in nodes)


def test_simulated_workers_have_no_compute_threads() -> None:
    for engine, flags, defaults in (("sim", ["--engine", "sim"], set()), (None, [], {"KVMESH_WORKER_THREADS"})):
        workers = [spec for spec in made(engine=engine).processes if spec.kind == "worker"]
        assert all([part for part in spec.command if part in ("--engine", "sim")] == flags for spec in workers)
        assert all(set(spec.defaults) == defaults for spec in workers)
