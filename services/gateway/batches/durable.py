"""Files that are written once: they appear whole or not at all, and the first of several writers wins.

A hard link is what decides, so that it holds for processes on several machines that share a POSIX file system.
"""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path
from typing import TypeVar

import msgspec

from services.common.durable_file import sync_path

R = TypeVar("R")


def create(path: Path, data: bytes) -> bool:
    """Make a file of mode 0600; False, and nothing is changed, where there is one. Raises OSError."""
    temporary = temporary_beside(path)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_record(path: Path, kind: type[R]) -> R | None:
    """What was created there as JSON; None where there is nothing. Raises OSError, also for what cannot be that."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise OSError(errno.EIO, "a record cannot be read") from None


def publish(written: Path, path: Path) -> bool:
    """Give a file, complete and on disk, its name as well; False where another has it. Raises OSError."""
    try:
        os.link(written, path)
    except FileExistsError:
        return False
    sync_path(path.parent)
    return True


def make_folder(path: Path) -> None:
    """With its parents, for this user alone, and for good. Raises OSError."""
    if path.is_dir():
        return
    make_folder(path.parent)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not path.is_dir():
            raise
    sync_path(path.parent)


def temporary_beside(path: Path) -> Path:
    """A name in the same folder for what is not complete; see `is_temporary`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


def is_temporary(name: str) -> bool:
    """Whether a file was not complete when its writer last wrote."""
    return name.startswith(".")
