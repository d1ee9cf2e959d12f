"""The models of the mesh, from what workers say of themselves and what operators have set. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.router.control.entries import AdapterEntry, ModelEntry
from services.router.domain import Identity
from services.router.workers import WorkerTable

# Who makes embeddings is told of before who does not tell, and that before who makes none.
_PREFERENCE = {"": 1, "none": 2}


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model, told by one of its workers, and how many replicas would take a request now.

    pooling: what makes its embeddings. Vectors of two kinds cannot be compared, so where workers differ all come from
    one kind: that of most ready replicas, then of most, then the first by name; "none" or "" where nobody makes any.
    """

    identity: Identity
    ready_replicas: int
    created_s: int
    pooling: str


@dataclass(frozen=True, slots=True)
class Models:
    """Models of workers, what is registered of each public name, adapters by base model and name, and aliases."""

    entries: tuple[CatalogEntry, ...] = ()
    registered: tuple[tuple[str, ModelEntry], ...] = ()
    adapters: tuple[tuple[tuple[str, str], AdapterEntry], ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()


def list_models(table: WorkerTable, serving: npt.NDArray[np.bool_]) -> tuple[CatalogEntry, ...]:
    """Every model of a known worker, by name and digest; those without a ready worker too."""
    replicas: dict[tuple[str, bytes], list[_Replica]] = defaultdict(list)
    for worker in table.workers.values():
        if (identity := worker.identity) is not None:
            started_s = worker.record.started_s or worker.record.epoch // 1_000_000
            one = _Replica(identity, is_ready=bool(serving[worker.row]), started_s=started_s)
            replicas[identity.model, identity.model_digest].append(one)
    return tuple(_entry(replicas[key]) for key in sorted(replicas))


@dataclass(frozen=True, slots=True)
class _Replica:
    identity: Identity
    is_ready: bool
    started_s: int


def _entry(replicas: Sequence[_Replica]) -> CatalogEntry:
    return CatalogEntry(
        identity=replicas[0].identity,
        ready_replicas=sum(one.is_ready for one in replicas),
        created_s=min(one.started_s for one in replicas),
        pooling=_pooling(replicas),
    )


def _pooling(replicas: Sequence[_Replica]) -> str:
    ready, known = Counter[str](), Counter[str]()
    for one in replicas:
        known[one.identity.pooling] += 1
        ready[one.identity.pooling] += one.is_ready
    return min(known, key=lambda kind: (_PREFERENCE.get(kind, 0), -ready[kind], -known[kind], kind))
