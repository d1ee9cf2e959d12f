"""The worker's block pool, seen from the mover: the same memory that the engine computes in."""

from __future__ import annotations

import mmap
import os

from services.common.settings import ConfigurationError
from services.common.transfer.shm_regions import adopt_region

# Checksums of this much run on the event loop (about a quarter of a millisecond): bytes that have just arrived are
# read fastest at once, and the next ones arrive in the kernel meanwhile. More goes to a thread.
INLINE_BYTES = 4 * 2**20


class SharedPool:
    """Maps an inherited memory file of `num_blocks` slots."""

    def __init__(self, descriptor: int, num_blocks: int, block_bytes: int) -> None:
        """block_bytes: of a slot, which has this rank's heads. Raises ConfigurationError when the file is smaller."""
        size = num_blocks * block_bytes
        if os.fstat(descriptor).st_size < size:
            raise ConfigurationError(f"mover: pool_fd={descriptor}: smaller than {num_blocks} x {block_bytes} bytes")
        self._view = memoryview(mmap.mmap(descriptor, size))
        # The engine has mapped the file before the mover starts, so nobody else needs to write it.
        self.region = adopt_region(descriptor, self._view)
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes

    def slot(self, index: int) -> memoryview:
        """Memory of one slot. Raises IndexError."""
        if not 0 <= index < self.num_blocks:
            raise IndexError(f"slot {index} of {self.num_blocks}")
        return self._view[index * self.block_bytes : (index + 1) * self.block_bytes]
