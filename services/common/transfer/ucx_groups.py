"""Which neighbouring blocks travel as one message: those that adjoin in memory at both ends.

A message costs UCX a rendezvous of its own, about as much as 100 KiB of payload over TCP, so blocks that lie one
behind the other at the holder and at the puller are sent together. The puller says how its buffers adjoin.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

# Most of one message; more would only delay the checks of what has arrived.
GROUP_BYTES = 2 * 2**20

# Address and size in bytes of a payload or a buffer.
Extent = tuple[int, int]


def run_lengths(extents: Sequence[Extent]) -> list[int]:
    """Lengths of the runs of extents that adjoin in memory, in order."""
    lengths: list[int] = []
    end = None
    for address, num_bytes in extents:
        if address == end:
            lengths[-1] += 1
        else:
            lengths.append(1)
        end = address + num_bytes
    return lengths


def run_starts(lengths: Sequence[int], count: int) -> set[int]:
    """Where each of these runs begins; beyond the last, every one of the `count` is a run of its own."""
    starts: set[int] = set()
    position = 0
    for length in lengths:
        if length <= 0 or position >= count:
            break
        starts.add(position)
        position += length
    return starts.union(range(position, count))


def group_sizes(extents: Sequence[Extent], first: int, starts: set[int], max_bytes: int = GROUP_BYTES) -> list[int]:
    """How many blocks each message takes. first: number of the first of `extents` in the pull that `starts` counts."""
    sizes: list[int] = []
    end, taken = None, 0
    for index, (address, num_bytes) in enumerate(extents, first):
        if address == end and index not in starts and taken + num_bytes <= max_bytes:
            sizes[-1] += 1
        else:
            sizes.append(1)
            taken = 0
        taken += num_bytes
        end = address + num_bytes
    return sizes


def span(extents: Sequence[Extent]) -> memoryview:
    """The memory of adjoining extents as one; it keeps nothing alive. Raises ValueError when they do not adjoin."""
    if run_lengths(extents) != [len(extents)]:
        raise ValueError("memory that does not adjoin")
    address, num_bytes = extents[0][0], sum(size for _, size in extents)
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
