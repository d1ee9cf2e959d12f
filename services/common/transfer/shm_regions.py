"""Memory that a process shows to authenticated peers on its host, and how they see it.

A region is a sealed memory file: it can neither shrink under a reader (who would die of SIGBUS) nor be mapped for
writing by anybody new, so handing out its descriptor gives away reading alone. Receivers insist on the first seal.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import sys
import weakref
from collections.abc import Sequence

import numpy as np
import structlog

from services.common.transfer.errors import ProtocolViolation

MAX_REGIONS = 16
# Of <linux/fcntl.h>; Python names only some of them.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 2, 4, 16
_log = structlog.get_logger()


def shm_supported() -> bool:
    """Whether this platform has what regions need."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


class Region:
    """A sealed memory file and this process's mapping of it, which is `view` and may be written."""

    def __init__(self, descriptor: int, view: memoryview) -> None:
        """Takes over `descriptor`, which is closed with the region. Raises OSError when the file cannot be sealed."""
        fcntl.fcntl(descriptor, _ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW | _SEAL_FUTURE_WRITE)
        self.descriptor = descriptor
        # Peers that have the file, and views of the mapping, keep what they have.
        weakref.finalize(self, os.close, descriptor)
        self.view = view
        self._address = _address(view)

    def offset_of(self, payload: memoryview) -> int | None:
        """Where `payload` lies in the region; None when it does not."""
        offset = _address(payload) - self._address
        return offset if 0 <= offset <= len(self.view) - len(payload) else None


def create_region(name: str, num_bytes: int, *, large_pages: bool = False) -> Region | None:
    """Fresh zeroed memory, taken from the system as it is first written. None where regions are not supported.

    large_pages: in large pages where the system allows it (shmem_enabled=advise), which copies of blocks profit from.
    """
    if not shm_supported():
        return None
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    mapping = mmap.mmap(descriptor, num_bytes)
    if large_pages:
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return Region(descriptor, memoryview(mapping))


def adopt_region(descriptor: int, view: memoryview) -> Region | None:
    """A region of a memory file that has been mapped already by all who write it; None when it cannot be sealed."""
    if not shm_supported():
        return None
    try:
        return Region(descriptor, view)
    except OSError as error:
        _log.warning("memory cannot be shown to peers on this host", detail=error.strerror)
        return None


def locate(regions: Sequence[Region], payload: memoryview) -> tuple[int, int] | None:
    """Number of the region that holds `payload`, and the offset there."""
    for number, region in enumerate(regions):
        if (offset := region.offset_of(payload)) is not None:
            return number, offset
    return None


def map_received(descriptor: int) -> memoryview:
    """Read-only view of a peer's region; closes the descriptor. Raises ProtocolViolation when it is not safe."""
    try:
        if not fcntl.fcntl(descriptor, _GET_SEALS) & _SEAL_SHRINK:
            raise ProtocolViolation("a region that could shrink")
        return memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size, prot=mmap.PROT_READ))
    except (OSError, ValueError) as error:
        raise ProtocolViolation(f"a region that cannot be mapped: {error}") from None
    finally:
        os.close(descriptor)


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
