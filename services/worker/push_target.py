"""Which kvstore node a worker pushes to: one on its own host, else by rendezvous hashing over the living nodes.

Rendezvous hashing (Thaler and Ravishankar, 1998): each node scores the worker, the highest score wins, so that a node
that comes or goes moves only its own workers. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from services.common.registry import LocationRecord
from services.worker.messages import PushTarget

NO_TARGET = PushTarget("", 0, "", "")


def choose_target(records: Iterable[LocationRecord], *, worker_id: str, host: str) -> PushTarget:
    """The node for `worker_id`, NO_TARGET when none is alive."""
    nodes = [record for record in records if record.kind == "kvstore"]
    candidates = [node for node in nodes if node.host == host] or nodes
    if not candidates:
        return NO_TARGET
    best = max(candidates, key=lambda node: _score(worker_id, node.id))
    return PushTarget(best.id, best.epoch, best.pull_address, best.transfer_grpc_address or best.grpc_address)


def _score(worker_id: str, node_id: str) -> bytes:
    return blake2b(f"{len(worker_id)}:{worker_id}{node_id}".encode(), digest_size=8).digest()
