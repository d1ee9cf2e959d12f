"""From options to a running supervisor, in this process or in one of its own.

A detached supervisor reads its options from standard input and writes what happens to standard output, one JSON
object a line, until the mesh is ready: `{"line": ...}`, then `{"ready": ...}` or `{"error": ...}`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import redis

from services.cli.binaries import MissingBinaryError, envoy_binary, valkey_binary
from services.cli.errors import CliError, StartError
from services.cli.logs import open_log
from services.cli.options import MeshOptions, mesh_options
from services.cli.plan import Binaries, MeshPlan, Planner
from services.cli.ports import free_ports, is_free
from services.cli.state import StateDir
from services.cli.supervisor import Supervisor
from services.common.models import resolve_model

_REDIS_TIMEOUT_S = 3.0
_EXIT_WAIT_S = 60.0


def run_supervisor(
    options: MeshOptions, state: StateDir, *, report: Callable[[str], None], on_ready: Callable[[], None]
) -> None:
    """Start the mesh and stay until a stop signal. Raises CliError; nothing is left running."""
    state.create()
    with state.locked():
        # Services inherit it: what they create is for this user alone.
        os.umask(0o077)
        password = secrets.token_urlsafe(24)
        plan = _plan(options, state, password)
        for path, text in plan.files.items():
            state.write_private(path, text)
        state.dump.unlink(missing_ok=True)
        state.write_private(state.redis_url_file, plan.redis_url + "\n")
        supervisor = Supervisor(
            plan,
            state,
            redis_password=password,
            start_timeout_s=options.start_timeout_s,
            report=_logged(report, state),
        )
        asyncio.run(supervisor.run(on_ready))


def start_detached(options: MeshOptions, state: StateDir, report: Callable[[str], None]) -> None:
    """Start a supervisor in the background and return when the mesh is ready. Raises CliError."""
    state.create()
    log = open_log(state.log("supervisor"))
    process = subprocess.Popen(
        [sys.executable, "-m", "services.cli.start", str(state.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        start_new_session=True,
    )
    os.close(log)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with process.stdin as stdin:
            stdin.write(options.model_dump_json())
        for line in process.stdout:
            event = json.loads(line)
            if "ready" in event:
                return
            if "error" in event:
                raise StartError(event["error"])
            report(event["line"])
        raise StartError(f"the supervisor ended; see {state.log('supervisor')}")
    except BaseException:
        _end(process)
        raise


def stop_supervisor(state: StateDir, timeout_s: float) -> bool:
    """SIGTERM to the supervisor and wait for it, SIGKILL after the timeout; False when none runs."""
    pid = state.supervisor_pid()
    if pid <= 0:
        return False
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        while state.supervisor_pid() == pid:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                raise CliError(f"the mesh did not stop within {timeout_s:g} s; killed")
            time.sleep(0.05)
    return True


def _plan(options: MeshOptions, state: StateDir, password: str) -> MeshPlan:
    if not is_free(options.http_host, options.http_port):
        raise StartError(f"port {options.http_port} on {options.http_host} is taken (--http-port)")
    models, on_demand = (tuple(map(resolve_model, specs)) for specs in (options.models, options.on_demand))
    names = [source.name for source in (*dict.fromkeys(models), *on_demand)]
    if len(set(names)) < len(names):
        raise StartError(f"--on-demand: two models have one name ({', '.join(sorted(names))})")
    try:
        binaries = Binaries(envoy=envoy_binary(), valkey=valkey_binary())
    except MissingBinaryError as error:
        raise StartError(str(error)) from None
    if options.redis_url:
        _check_redis(options.redis_url)
    endpoint = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    return Planner(
        options,
        models,
        on_demand,
        state=state,
        binaries=binaries,
        ports=free_ports(),
        redis_password=password,
        otlp_endpoint=endpoint or "",
    ).plan()


def _check_redis(url: str) -> None:
    try:
        client = redis.Redis.from_url(url, socket_timeout=_REDIS_TIMEOUT_S, socket_connect_timeout=_REDIS_TIMEOUT_S)
        with client:
            client.ping()
    except (redis.RedisError, ValueError) as error:
        shown = url.rpartition("@")[2]
        raise StartError(f"Redis at {shown} does not answer: {str(error).splitlines()[0]}") from None


def _logged(report: Callable[[str], None], state: StateDir) -> Callable[[str], None]:
    """`report` that also writes to the supervisor's log."""
    log = open_log(state.log("supervisor"))

    def both(line: str) -> None:
        os.write(log, f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {line}\n".encode())
        report(line)

    return both


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_EXIT_WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class _EventPipe:
    """Standard output of a detached supervisor; silent once the reader has what it waited for."""

    def __init__(self) -> None:
        self._open = True

    def send(self, **event: object) -> None:
        if self._open:
            with contextlib.suppress(BrokenPipeError):
                sys.stdout.write(json.dumps(event) + "\n")
                sys.stdout.flush()

    def ready(self) -> None:
        self.send(ready=True)
        self._open = False
        # The terminal's pipe must not stay open for the life of the mesh.
        devnull = os.open(os.devnull, os.O_RDWR)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)


def _detached_main() -> int:
    pipe = _EventPipe()
    options = mesh_options(**json.load(sys.stdin))
    try:
        run_supervisor(
            options, StateDir(Path(sys.argv[1])), report=lambda line: pipe.send(line=line), on_ready=pipe.ready
        )
    except Exception as error:
        pipe.send(error=str(error) or type(error).__name__)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_detached_main())
