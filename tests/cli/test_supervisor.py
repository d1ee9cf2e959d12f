"""The supervisor with real processes: Valkey, Envoy, and small real gRPC servers in the places of the services."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.cli import child as child_module
from services.cli import supervisor as supervisor_module
from services.cli.binaries import envoy_binary, valkey_binary
from services.cli.errors import StartError
from services.cli.listing import is_alive, list_processes
from services.cli.options import MeshOptions
from services.cli.plan import Binaries, MeshPlan, Planner
from services.cli.ports import free_ports
from services.cli.state import StateDir
from services.cli.supervisor import Supervisor
from services.cli.watchdog import until_silent
from services.common.models import ModelSource

PASSWORD = "password-of-the-test"
PROGRAM = Path(__file__).with_name("service_program.py")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes die with their parent on Linux")


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    made = StateDir(tmp_path / "state")
    made.create()
    return made


def mesh_plan(state: StateDir, **faults: str) -> MeshPlan:
    """Every kind once; `faults` by kind."""
    ports = free_ports()
    plan = Planner(
        MeshOptions(http_port=next(ports)),
        (ModelSource("m", Path("/m.gguf")),),
        state=state,
        binaries=Binaries(envoy_binary(), valkey_binary()),
        ports=ports,
        redis_password=PASSWORD,
        otlp_endpoint="",
    ).plan()
    processes = []
    for spec in plan.processes:
        if spec.kind not in ("envoy", "valkey"):
            flags = ("--listen", spec.address, "--ready-file", str(state.ready_file(spec.name)))
            fault = ("--fault", faults.get(spec.kind, ""))
            spec = dataclasses.replace(spec, command=(sys.executable, str(PROGRAM), *flags, *fault))
        processes.append(spec)
    for path, text in plan.files.items():
        state.write_private(path, text)
    state.write_private(state.redis_url_file, plan.redis_url)
    return dataclasses.replace(plan, processes=tuple(processes))


@asynccontextmanager
async def running(state: StateDir, lines: list[str], **faults: str) -> AsyncIterator[None]:
    """A ready mesh that is stopped by SIGTERM as an operator would."""
    ready = asyncio.Event()
    supervisor = Supervisor(
        mesh_plan(state, **faults), state, redis_password=PASSWORD, start_timeout_s=60, report=lines.append
    )
    with state.locked():
        run = asyncio.create_task(supervisor.run(ready.set))
        waiter = asyncio.create_task(ready.wait())
        await asyncio.wait({run, waiter}, return_when=asyncio.FIRST_COMPLETED)
        try:
            yield
        finally:
            if not run.done():
                os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(60):
                await run
            waiter.cancel()


async def until(condition: Callable[[], bool], within_s: float = 60) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.02)


def gone(pid: int) -> bool:
    return not is_alive(pid)


async def test_a_mesh_starts_heals_and_stops(state: StateDir) -> None:
    lines: list[str] = []
    async with running(state, lines):
        listed = await list_processes(state)
        assert [one["kind"] for one in listed] == ["valkey", "kvstore", "router", "worker", "gateway", "envoy"]
        assert all(one["ready"] for one in listed)
        by_name = {one["name"]: one for one in listed}
        told = {"name", "kind", "release", "pid", "address", "metrics", "restarts", "silences", "ready", "children"}
        assert set(by_name["worker-0"]) == told
        assert [child["role"] for child in by_name["worker-0"]["children"]] == ["helper"]
        pids = [one["pid"] for one in listed] + [child["pid"] for one in listed for child in one["children"]]
        assert state.log("envoy").stat().st_mode & 0o777 == 0o600

        for name in ("worker-0", "valkey"):
            os.kill(by_name[name]["pid"], signal.SIGKILL)
            await until(lambda name=name: f"{name} is ready again" in lines)  # type: ignore[misc]
            assert any(line.startswith(f"{name} ended (SIGKILL); starting it again") for line in lines)
        healed = {one["name"]: one for one in await list_processes(state)}
        assert healed["worker-0"]["pid"] != by_name["worker-0"]["pid"]
        assert healed["worker-0"]["address"] == by_name["worker-0"]["address"]
        assert all(one["ready"] for one in healed.values())
        pids += [healed["worker-0"]["pid"], healed["valkey"]["pid"]]
    assert all(gone(pid) for pid in pids)
    assert state.supervisor_pid() == 0


async def test_what_falls_silent_is_killed_and_started_again(state: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped processes; one whose loop hangs is the same to whoever asks it."""
    monkeypatch.setattr(child_module, "until_silent", functools.partial(until_silent, silence_s=4.0))
    lines: list[str] = []
    async with running(state, lines):
        before = {one["name"]: one for one in await list_processes(state)}
        stopped = [name for name in before if name != "router-0"]
        (helper,) = (child["pid"] for child in before["worker-0"]["children"])
        for name in stopped:
            os.kill(before[name]["pid"], signal.SIGSTOP)
        os.kill(helper, signal.SIGSTOP)
        await until(lambda: all(f"{name} is ready again" in lines for name in stopped), within_s=90)
        assert all(f"{name} has been silent for 4 s; killed" in lines for name in stopped)
        after = {one["name"]: one for one in await list_processes(state)}
        assert {name: one["silences"] for name, one in after.items()} == {name: int(name in stopped) for name in after}
        assert all(one["ready"] for one in after.values())
        assert gone(helper)
        assert after["router-0"]["pid"] == before["router-0"]["pid"]


async def test_progress_is_told_once_for_each_change(state: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter(["loading 5 %"] * 3)
    asked: list[str] = []

    async def progress(address: str) -> str:
        asked.append(address)
        return next(told, "loading 100 %")

    monkeypatch.setattr(supervisor_module, "load_progress", progress)
    monkeypatch.setattr(supervisor_module, "_PROGRESS_INTERVAL_S", 0.01)
    lines: list[str] = []
    async with running(state, lines):
        pass
    assert len(asked) > 4
    assert [line for line in lines if "loading" in line] == ["worker-0: loading 5 %", "worker-0: loading 100 %"]


async def test_a_broken_configuration_ends_the_start_with_its_line(state: StateDir) -> None:
    with pytest.raises(StartError, match=r"^router-0 does not start: router: threads='x': not a number") as caught:
        async with running(state, [], router="configuration"):
            pass
    assert "\n" not in str(caught.value)
    await assert_nothing_left(state)


async def test_a_crash_loop_ends_the_start(state: StateDir) -> None:
    lines: list[str] = []
    with pytest.raises(StartError, match=r"^gateway-0 does not start: out of luck"):
        async with running(state, lines, gateway="crash"):
            pass
    assert sum(line.startswith("gateway-0 ended (status 1)") for line in lines) == child_module.START_ATTEMPTS - 1
    await assert_nothing_left(state)


async def test_what_does_not_stop_is_killed(state: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "STOP_DEADLINE_S", 0.5)
    lines: list[str] = []
    async with running(state, lines, worker="stubborn"):
        (pid,) = [one["pid"] for one in await list_processes(state) if one["kind"] == "worker"]
    assert "worker-0 did not stop within 0.5 s; killed" in lines
    assert gone(pid)


async def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    launcher = Path(child_module.__file__).with_name("launch.py")
    parent = (
        "import os, subprocess, sys, time\n"
        f"launch = [sys.executable, '-I', '-S', {str(launcher)!r}, str(os.getpid())]\n"
        "child = subprocess.Popen([*launch, '/bin/sleep', '99'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(99)\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", parent, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    pid = int(await process.stdout.readline())
    await until(lambda: gone(pid) or b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes())
    assert not gone(pid)
    process.kill()
    await process.wait()
    await until(lambda: gone(pid))


async def assert_nothing_left(state: StateDir) -> None:
    """No process has the state directory in its command line."""
    needle = str(state.root).encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            assert needle not in (folder / "cmdline").read_bytes(), folder
        except OSError:
            continue
