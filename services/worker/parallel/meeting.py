"""How the ranks of a group find each other, and over which interface they speak.

On one host: an empty file that all of them have inherited, and the loopback interface. On several: a store that rank 0
has, and of each rank the interface with the address that the others reach it at. Neither store nor gloo asks who calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from services.worker.engine.config import RankConfig, SpreadConfig
from services.worker.errors import RankLost

# Others can reach that of the host's name, or one that the environment names, which gloo would take.
_LOOPBACK = "lo"
# Its stubs lack most of what it has.
_distributed: Any = dist


@dataclass(frozen=True)
class Meeting:
    """store: as torch.distributed knows it, open as long as this is held. device: gloo's, for one interface."""

    store: Any
    device: Any


def meeting(place: RankConfig, num_ranks: int) -> Meeting:
    """Of one rank. Raises RankLost where rank 0's store cannot be reached, or the rank's own host is not its own."""
    gloo = _distributed.ProcessGroupGloo
    if place.spread is None:
        # Opened anew by every rank: locks on a descriptor that was inherited would be everybody's.
        store = _distributed.FileStore(f"/proc/self/fd/{place.store_fd}", num_ranks)
        return Meeting(store, gloo.create_device(interface=_LOOPBACK))
    try:
        store = _tcp_store(place, place.spread)
        return Meeting(store, gloo.create_device(hostname=place.spread.own_host))
    except RuntimeError as error:
        raise RankLost(f"ranks cannot meet at {place.spread.store_address}: {str(error).splitlines()[0]}") from error


def _tcp_store(place: RankConfig, spread: SpreadConfig) -> Any:
    host, _, port = spread.store_address.rpartition(":")
    timeout = timedelta(seconds=place.load_timeout_s)
    if place.rank:
        return _distributed.TCPStore(host.strip("[]"), int(port), is_master=False, timeout=timeout)
    return _distributed.TCPStore(
        host.strip("[]"),
        int(port),
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=place.store_fd,
    )
