"""Command lines of new versions, and counts read from routers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.canary_options import CanaryOptions, canary_options, flag_of, parse_flags, with_flags
from services.cli.canary_plan import CANARY, CanaryPlan, canary_plan
from services.cli.errors import CliError
from services.cli.plan import ProcessSpec
from services.cli.state import StateDir
from services.cli.version_counts import read_counts, traffic
from services.common.settings import ConfigurationError

NAMES = st.sampled_from(["model", "role", "a", "a-b", "dtype"])
VALUES = st.sampled_from(["x", "model", "/a", "7"])
FLAGS = st.dictionaries(NAMES, VALUES, max_size=4)


def line(flags: dict[str, str]) -> tuple[str, ...]:
    return ("python", "-m", "worker", *(word for name, value in flags.items() for word in (f"--{name}", value)))


@given(FLAGS, FLAGS)
def test_flags_are_set_once_and_others_stay(before: dict[str, str], new: dict[str, str]) -> None:
    command = with_flags(line(before), new)
    assert command[:3] == ("python", "-m", "worker")
    assert parse_flags_of(command) == before | new
    assert with_flags(command, new) == command


def parse_flags_of(command: tuple[str, ...]) -> dict[str, str]:
    words = command[3:]
    assert len(set(words[::2])) == len(words[::2])
    return {name: flag_of(command, name) for name in (word.removeprefix("--") for word in words[::2])}


def test_worker_flags() -> None:
    assert parse_flags("--threads 2 --dtype=float32 --name 'a b'") == {
        "threads": "2",
        "dtype": "float32",
        "name": "a b",
    }
    for wrong in ("threads 2", "--threads", "--threads --dtype x", "--listen 0.0.0.0:1", "--model x", "'"):
        with pytest.raises(CliError, match="--worker-flags"):
            parse_flags(wrong)


def test_options() -> None:
    assert canary_options({"model": "x"}).share == 5
    with pytest.raises(CliError, match="nothing is new"):
        canary_options({"share": 7})
    with pytest.raises(CliError, match="--share=99"):
        canary_options({"model": "x", "share": 99})
    with pytest.raises(CliError, match="--version"):
        canary_options({"model": "x", "version": "no spaces"})


def spec(name: str, model: str, role: str = "") -> ProcessSpec:
    flags = {"instance": name, "listen": f"{name}:1", "model": model, **({"role": role} if role else {})}
    return ProcessSpec(name, "worker", line(flags), f"{name}:1", f"{name}:2")


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    for name in "ab":
        (tmp_path / f"{name}.gguf").touch()
    return [str(tmp_path / f"{name}.gguf") for name in "ab"]


def plan(options: dict[str, str], specs: list[ProcessSpec], tmp_path: Path) -> CanaryPlan:
    return canary_plan(CanaryOptions(**options), specs, StateDir(tmp_path), address="c:1", metrics="c:2")  # type: ignore[arg-type]


def test_a_new_model_keeps_its_name_and_the_workers_their_addresses(models: list[str], tmp_path: Path) -> None:
    one, two = models
    specs = [spec("w0", f"m={one}", "decode"), spec("w1", f"m={one}", "prefill")]
    made = plan({"model": two, "version": "v2", "worker_flags": "--threads 3"}, specs, tmp_path)
    assert (made.name, made.workers) == ("m", ("w1", "w0")), "who only computes prompts goes first"
    canary = {name: flag_of(made.canary.command, name) for name in ("instance", "listen", "model", "role", "threads")}
    assert canary == {"instance": CANARY, "listen": "c:1", "model": f"m={two}", "role": "both", "threads": "3"}
    after = made.successor(specs[0])
    assert (after.name, after.address, flag_of(after.command, "role")) == ("w0", "w0:1", "decode")
    assert (flag_of(after.command, "model"), flag_of(after.command, "revision")) == (f"m={two}", "v2")


def test_which_of_several_models(models: list[str], tmp_path: Path) -> None:
    one, two = models
    specs = [spec("w0", f"m={one}"), spec("w1", f"n={one}")]
    assert plan({"model": f"n={two}"}, specs, tmp_path).workers == ("w1",)
    with pytest.raises(CliError, match="serves m, n"):
        plan({"model": two}, specs, tmp_path)
    with pytest.raises(CliError, match="no worker of this mesh serves 'o'"):
        plan({"model": f"o={two}"}, specs, tmp_path)
    with pytest.raises(ConfigurationError):
        plan({"model": "m=/none.gguf"}, specs, tmp_path)


def test_counts_of_a_version_since_a_moment() -> None:
    page = """# HELP kvmesh_router_version_attempts_total x
kvmesh_router_version_attempts_total{digest="aaaaaaaaaaaa",model="m",otel_scope_name="kvmesh.router",outcome="ok"} 7.0
kvmesh_router_version_attempts_total{digest="aaaaaaaaaaaa",model="m",outcome="worker_failed"} 2.0
kvmesh_router_version_attempts_total{digest="bbbbbbbbbbbb",model="m",outcome="ok"} 5.0
kvmesh_router_version_ttft_seconds_bucket{digest="aaaaaaaaaaaa",le="+Inf",model="m"} 4.0
kvmesh_router_version_ttft_seconds_count{digest="aaaaaaaaaaaa",model="m"} 4.0
kvmesh_router_version_ttft_seconds_sum{digest="aaaaaaaaaaaa",model="m"} 2.0
"""
    now, digest = read_counts(page), "a" * 32
    seen = traffic([({}, now)], digest)
    assert (seen.completed, seen.failed, seen.timed, seen.ttft_s, seen.tpot_s) == (7, 2, 4, 0.5, 0.0)
    assert traffic([(now, now)], digest).attempts == 0
    restarted = {key: value + 100 for key, value in now.items()}
    assert traffic([(restarted, now), ({}, now)], digest).attempts == 18
    assert traffic([({}, now)], "c" * 32).attempts == 0
