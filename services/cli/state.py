"""The state directory of a local mesh: secret, logs, ready files, the lock and the supervisor's snapshot.

The directory is 0700 and every file in it 0600. Holding the lock is what makes a process the supervisor.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.cli.errors import AlreadyRunningError, CliError, NotRunningError
from services.common.bearer_keys import hash_key
from services.common.security import create_secret_file

DEFAULT_STATE = ".kvmesh"
STATE_VARIABLE = "KVMESH_STATE"


def state_path(given: Path | None) -> Path:
    """`--state`, else the environment's, else `.kvmesh` here."""
    return (given or Path(os.environ.get(STATE_VARIABLE) or DEFAULT_STATE)).expanduser().absolute()


@dataclass(frozen=True, slots=True)
class StateDir:
    """Paths of one mesh."""

    root: Path

    @property
    def logs(self) -> Path:
        """Log files."""
        return self.root / "logs"

    @property
    def run(self) -> Path:
        """Ready files and generated configuration of the running processes."""
        return self.root / "run"

    @property
    def dump(self) -> Path:
        """What a Valkey leaves to the one that replaces it; there only meanwhile."""
        return self.run / "dump.rdb"

    @property
    def secret_file(self) -> Path:
        """The mesh secret; survives restarts, so that block ids do."""
        return self.root / "mesh_secret"

    @property
    def admin_key_file(self) -> Path:
        """The key that opens the control API of this mesh; survives restarts."""
        return self.root / "admin_key"

    @property
    def admin_keys_file(self) -> Path:
        """Its hash, for the routers."""
        return self.root / "admin_keys"

    @property
    def redis_url_file(self) -> Path:
        """Where Redis is, password included."""
        return self.root / "redis_url"

    @property
    def socket(self) -> Path:
        """Where the running supervisor takes commands."""
        return self.run / "supervisor.sock"

    def ssd(self, name: str) -> Path:
        """Blocks of a kvstore node; survives restarts."""
        return self.root / "ssd" / name

    @property
    def files(self) -> Path:
        """Files and batches; survive restarts."""
        return self.root / "files"

    def generations(self, name: str) -> Path:
        """Generations of cleared tenants that a gateway keeps; survives restarts, as the SSDs do."""
        return self.root / f"generations.{name}"

    def usage(self, name: str) -> Path:
        """What a gateway has counted of usage; survives restarts."""
        return self.root / f"usage.{name}"

    def log(self, name: str) -> Path:
        """Log file of a process."""
        return self.logs / f"{name}.log"

    def ready_file(self, name: str) -> Path:
        """Ready file of a process."""
        return self.run / f"{name}.ready.json"

    def create(self) -> None:
        """Make what is missing. Raises CliError naming the path."""
        try:
            for folder in (self.root, self.logs, self.run):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                folder.chmod(0o700)
            create_secret_file(self.secret_file)
            create_secret_file(self.admin_key_file)
            hashed = hash_key(self.admin_key_file.read_text().strip())
            self.write_private(self.admin_keys_file, f"{hashed} local\n")
        except OSError as error:
            raise CliError(f"state directory {self.root}: {error.strerror}") from None

    def write_private(self, path: Path, text: str) -> None:
        """Replace a file of mode 0600 at once."""
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        temporary.replace(path)

    def publish(self, snapshot: dict[str, Any]) -> None:
        """Tell other commands what runs."""
        self.write_private(self.root / "mesh.json", json.dumps(snapshot, indent=1))

    def snapshot(self) -> dict[str, Any]:
        """What the running supervisor last published. Raises NotRunningError."""
        if self.supervisor_pid() == 0:
            raise NotRunningError(f"no mesh is running on {self.root} (--state or {STATE_VARIABLE} names another)")
        try:
            return json.loads((self.root / "mesh.json").read_text())  # type: ignore[no-any-return]
        except (OSError, ValueError):
            raise NotRunningError(f"the mesh on {self.root} is only just starting") from None

    def supervisor_pid(self) -> int:
        """Process that holds the lock; 0: none."""
        try:
            with (self.root / "lock").open("r") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return int(file.read() or -1)
        except FileNotFoundError:
            pass
        return 0

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the supervisor. Raises AlreadyRunningError."""
        descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise AlreadyRunningError(
                    f"a mesh is already running on {self.root} (pid {file.read().strip()}); `kvmesh down` stops it"
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            (self.root / "mesh.json").unlink(missing_ok=True)
            yield
