"""A process that stores chains and kills itself at a named step of the write path: `python -m tests.kvstore.ssd_crash`.

Arguments: directory, step, how often it is passed before, chains to push, chains to push at once. A step may be two,
joined by THEN: the second one counts only after the first. Chain 0 is wanted again and again, so that it is
copied forward. It prints what it has committed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from services.kvstore.ssd_format import PAGE_BYTES
from tests.common.transfer.blocks import chain
from tests.kvstore.ssd import SEGMENT_BYTES, flushed, opened, push

CHAIN_BLOCKS = 6
THEN = " then "


class Killer:
    """Ends the process at one step."""

    def __init__(self, step: str, passes: int) -> None:
        *self._before, self._step = step.split(THEN)
        self._passes = passes

    def reached(self, step: str) -> None:
        """SIGKILL at the step."""
        if self._before:
            if step == self._before[0]:
                del self._before[0]
        elif step == self._step:
            if self._passes == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self._passes -= 1


async def main(path: Path, step: str, passes: int, chains: int, together: int) -> None:
    """Push until the end comes. More chains at once need segments that take them in one frame."""
    killer = Killer(step, passes)
    segment_bytes = SEGMENT_BYTES * (4 if together > 1 else 1)
    sizes: dict[str, Any] = {"ssd_segment_bytes": segment_bytes, "ssd_bytes": 8 * segment_bytes + 2**19}
    async with opened(path, reached=killer.reached, chunk_bytes=PAGE_BYTES, **sizes) as one:
        for number in range(chains):
            await push(one.store, chain(CHAIN_BLOCKS, number))
            if (number + 1) % together:
                continue
            await flushed(one)
            for block_id in chain(CHAIN_BLOCKS, 0):
                one.layer.tier.mark_hot(block_id)
            held = [i for i in range(number + 1) if chain(CHAIN_BLOCKS, i)[-1] in one.layer.tier]
            print(*held, flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])))
