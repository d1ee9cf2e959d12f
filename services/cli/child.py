"""One supervised process: started, watched, started again when it ends or has fallen silent.

The process leads a session of its own, so a Ctrl-C in the terminal reaches only the supervisor, and dies with the
supervisor. Its output is appended to its log. A restart keeps name, ports and command. Where the program can do so, its
replacement takes over from it while it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from services.cli.contact import contact
from services.cli.errors import CliError, StartError
from services.cli.hot_restart import HotRestart
from services.cli.logs import last_lines, open_log
from services.cli.plan import ProcessSpec
from services.cli.probes import is_ready, valkey_reply
from services.cli.process_state import process_state
from services.cli.state import StateDir
from services.cli.watchdog import until_silent

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 10.0
# A process that lived so long is not in a crash loop.
STEADY_S = 20.0
START_ATTEMPTS = 3
CONFIGURATION_ERROR_STATUS = 2
_PROBE_INTERVAL_S = 0.1
_SAVE_ASK_TIMEOUT_S = 5.0
# By a signal, or by a debugger.
_STOPPED = ("T", "t")
_LAUNCHER = str(Path(__file__).with_name("launch.py"))


class Child:
    """`run` keeps the process alive until it is told to stop; `report` takes lines for a person."""

    def __init__(
        self,
        spec: ProcessSpec,
        state: StateDir,
        *,
        redis_password: str,
        start_limit_s: float,
        report: Callable[[str], None],
        changed: Callable[[], None],
    ) -> None:
        """start_limit_s: how long a process may take until it says anything at all."""
        self.spec = spec
        self.pid: int | None = None
        self.restarts = 0
        self.silences = 0
        self.ready = asyncio.Event()
        self._state = state
        self._redis_password = redis_password
        self._start_limit_s = start_limit_s
        self._report = report
        self._changed = changed
        self._was_ready = False
        self._stop_deadline_s = 0.0
        self._stopping = asyncio.Event()
        self._killing = asyncio.Event()
        self._replacing = asyncio.Event()
        self._lives = 0
        self._hot = HotRestart(spec) if spec.base_id else None
        self._successor: asyncio.subprocess.Process | None = None
        self._ended = asyncio.Event()
        self._ended.set()

    async def run(self) -> None:
        """Returns once stopped. Raises StartError when the process cannot get ready for the first time."""
        self._ended.clear()
        try:
            await self._keep_alive()
        finally:
            if self._successor is not None:
                _kill_group(self._successor.pid)
            if self._hot is not None:
                await self._hot.close()
            self._ended.set()

    def request_stop(self, deadline_s: float) -> None:
        """SIGINT now, SIGKILL after the deadline; no more restarts. For when nobody sends it requests any more."""
        self._stop_deadline_s = deadline_s
        self._stopping.set()

    def kill(self) -> None:
        """SIGKILL now; no more restarts."""
        self._killing.set()
        self._stopping.set()

    async def replace(self, deadline_s: float, start_limit_s: float) -> float:
        """Another process in the place of this one; seconds until that is ready.

        SIGTERM now and SIGKILL after the deadline, or a hot restart. Raises CliError when it takes longer than both
        limits together: it is then still tried, or, at a hot restart, given up.
        """
        started_s, lives = time.monotonic(), self._lives
        if self._hot is not None:
            await self._hand_over(self._hot, start_limit_s)
        if self.spec.kind == "valkey":
            await self._have_saved()
        self._stop_deadline_s = deadline_s
        self._replacing.set()
        try:
            async with asyncio.timeout(deadline_s + start_limit_s):
                while self._lives == lives:
                    await asyncio.sleep(_PROBE_INTERVAL_S)
                await self.ready.wait()
        except TimeoutError:
            raise CliError(f"{self.spec.name} is not ready again within {start_limit_s:g} s") from None
        return time.monotonic() - started_s

    async def wait_ended(self) -> None:
        """Until `run` has returned; at once if it never ran."""
        await self._ended.wait()

    async def _hand_over(self, hot: HotRestart, start_limit_s: float) -> None:
        """Start a successor beside the process; `_run_once` takes it up. Raises CliError, and then nothing changes."""
        await hot.check(start_limit_s)
        await hot.alone()
        process = await self._spawn(hot.epoch + 1)
        try:
            await hot.until_live(process, hot.epoch + 1, start_limit_s)
        except BaseException:
            _kill_group(process.pid)
            raise
        hot.epoch += 1
        self._successor = process

    async def _have_saved(self) -> None:
        """Have Valkey write its data when it is told to end; the next one reads it. Raises CliError."""
        try:
            async with asyncio.timeout(_SAVE_ASK_TIMEOUT_S):
                reply = await valkey_reply(
                    self.spec.address, self._redis_password, "CONFIG SET shutdown-on-sigterm save"
                )
        except (OSError, TimeoutError) as error:
            reply = type(error).__name__
        if reply != "+OK":
            raise CliError(f"{self.spec.name} would not keep its data ({reply}); the rollout ends here")

    async def _keep_alive(self) -> None:
        backoff_s, attempts = FIRST_BACKOFF_S, 0
        while not self._stopping.is_set():
            started = time.monotonic()
            status = await self._run_once()
            if self._stopping.is_set():
                return
            if self._replacing.is_set():
                self._replacing.clear()
                continue
            attempts += 1
            if not self._was_ready and (status == CONFIGURATION_ERROR_STATUS or attempts >= START_ATTEMPTS):
                raise StartError(self._last_words(status))
            if time.monotonic() - started > STEADY_S:
                backoff_s = FIRST_BACKOFF_S
            self._report(f"{self.spec.name} ended ({_describe(status)}); starting it again in {backoff_s:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), backoff_s)
            backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)
            self.restarts += 1

    async def _run_once(self) -> int:
        self._state.ready_file(self.spec.name).unlink(missing_ok=True)
        process, self._successor = self._successor or await self._spawn_anew(), None
        self._lives += 1
        self._set_pid(process.pid)
        watcher = asyncio.create_task(self._watch_readiness())
        silent = asyncio.create_task(self._watch_silence(process.pid))
        stopping = asyncio.create_task(self._stopping.wait())
        replacing = asyncio.create_task(self._replacing.wait())
        exit_status = asyncio.create_task(process.wait())
        try:
            await asyncio.wait({exit_status, stopping, replacing, silent}, return_when=asyncio.FIRST_COMPLETED)
            if self._successor is not None and self._hot is not None and not stopping.done():
                exit_status.cancel()
                self._hot.see_off(process)
                return 0
            if not exit_status.done() and not silent.done():
                number = signal.SIGINT if self._stopping.is_set() else signal.SIGTERM
                await self._terminate(process, number, exit_status)
            # What it left behind must not hold its ports.
            _kill_group(process.pid)
            return await exit_status
        finally:
            watches = (watcher, silent, stopping, replacing)
            for task in watches:
                task.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
            self.ready.clear()
            self._set_pid(None)

    async def _spawn_anew(self) -> asyncio.subprocess.Process:
        if self._hot is not None:
            self._hot.epoch = 0
        return await self._spawn(epoch=0)

    async def _spawn(self, epoch: int) -> asyncio.subprocess.Process:
        """epoch: of a hot restart; 0 has no predecessor."""
        command = self.spec.command
        if self._hot is not None:
            command = (*command, "--restart-epoch", str(epoch))
        log = open_log(self._state.log(self.spec.name))
        try:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", _LAUNCHER, str(os.getpid()), *command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self.spec.folder,
                env={**self.spec.defaults, **os.environ, **self.spec.environment},
            )
        finally:
            os.close(log)

    async def _terminate(
        self, process: asyncio.subprocess.Process, number: signal.Signals, exit_status: asyncio.Task[int]
    ) -> None:
        killing = asyncio.create_task(self._killing.wait())
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        done, _ = await asyncio.wait(
            {exit_status, killing}, return_when=asyncio.FIRST_COMPLETED, timeout=self._stop_deadline_s
        )
        if not done:
            self._report(f"{self.spec.name} did not stop within {self._stop_deadline_s:g} s; killed")
        killing.cancel()

    async def _watch_readiness(self) -> None:
        while not await is_ready(self.spec, self._redis_password):
            await asyncio.sleep(_PROBE_INTERVAL_S)
        if self._was_ready:
            self._report(f"{self.spec.name} is ready again")
        self._was_ready = True
        if self.spec.kind == "valkey":
            # It has read that; another start, after a crash, must not find what was true long ago.
            self._state.dump.unlink(missing_ok=True)
        self.ready.set()

    async def _watch_silence(self, pid: int) -> None:
        """Returns when the process is to be killed for its silence."""
        silence_s = await until_silent(
            contact(self.spec, self._redis_password),
            start_limit_s=self._start_limit_s,
            spoke=self.ready.is_set,
            stopped=lambda: process_state(pid) in _STOPPED,
        )
        self.silences += 1
        self._report(f"{self.spec.name} has been silent for {silence_s:g} s; killed")

    def _set_pid(self, pid: int | None) -> None:
        self.pid = pid
        self._changed()

    def _last_words(self, status: int) -> str:
        log = self._state.log(self.spec.name)
        lines = [line.strip() for line in last_lines(log, 20) if line.strip()]
        own = [line.removeprefix("kvmesh: ") for line in lines if line.startswith("kvmesh: ")]
        return f"{self.spec.name} does not start: {(own or lines or [_describe(status)])[-1]} (log: {log})"


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _describe(status: int) -> str:
    return f"status {status}" if status >= 0 else signal.Signals(-status).name
