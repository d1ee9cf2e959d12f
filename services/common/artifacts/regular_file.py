"""Opening what should be a regular file: a pipe would keep its reader waiting, a device never ends."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

# Of files that are read whole: configuration, index, manifest.
MAX_DOCUMENT_BYTES = 256 * 2**20


def open_regular(path: Path) -> int:
    """A descriptor to read from. Raises OSError, at once, for anything but a regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return descriptor


def read_document(path: Path) -> bytes:
    """All of a small file. Raises OSError."""
    with open(open_regular(path), "rb") as file:
        data = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise OSError(errno.EFBIG, f"over {MAX_DOCUMENT_BYTES} bytes")
    return data
