"""The models of the mesh, from what workers say of themselves and what operators have set. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.router.control.entries import AdapterEntry, ModelEntry
from services.router.domain import Identity
from services.router.workers import WorkerTable


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model, told by one of its workers, and how many replicas would take a request now."""

    identity: Identity
    ready_replicas: int
    created_s: int


@dataclass(frozen=True, slots=True)
class Models:
    """Models of workers, what is registered of each public name, adapters by base model and name, and aliases."""

    entries: tuple[CatalogEntry, ...] = ()
    registered: tuple[tuple[str, ModelEntry], ...] = ()
    adapters: tuple[tuple[tuple[str, str], AdapterEntry], ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()


def list_models(table: WorkerTable, serving: npt.NDArray[np.bool_]) -> tuple[CatalogEntry, ...]:
    """Every model of a known worker, by name and digest; those without a ready worker too."""
    found: dict[tuple[str, bytes], CatalogEntry] = {}
    for worker in table.workers.values():
        identity = worker.identity
        if identity is None:
            continue
        key = (identity.model, identity.model_digest)
        before = found.get(key)
        started_s = worker.record.started_s or worker.record.epoch // 1_000_000
        found[key] = CatalogEntry(
            identity=before.identity if before else identity,
            ready_replicas=(before.ready_replicas if before else 0) + int(serving[worker.row]),
            created_s=min(before.created_s, started_s) if before else started_s,
        )
    return tuple(found[key] for key in sorted(found))
